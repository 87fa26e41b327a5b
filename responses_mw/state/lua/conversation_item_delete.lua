-- Delete an item of a conversation.
-- KEYS: conversation
-- ARGV: owner, item id
-- Answers: {'deleted', created_at, metadata} and a report (lib.lua); {'missing'}; {'newer'}; {'cursor'} (no such id)

local refused = refusal(ARGV[1])
if refused then return {refused} end
local blob = redis.call('HGET', KEYS[1] .. ':items', ARGV[2])
if not blob then return {'cursor'} end
redis.call('HDEL', KEYS[1] .. ':items', ARGV[2])
redis.call('ZREM', KEYS[1] .. ':order', ARGV[2])
redis.call('HINCRBY', KEYS[1], 'bytes', -json_size(blob))
return with_size({'deleted', unpack(redis.call('HMGET', KEYS[1], 'created_at', 'metadata'))})
