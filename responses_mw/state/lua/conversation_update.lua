-- Replace a conversation's metadata.
-- KEYS: conversation
-- ARGV: owner, metadata, TTL in ms
-- Returns: {'updated', created_at} and a report (lib.lua); {'missing'}; {'newer'}

local refused = refusal(ARGV[1])
if refused then return {refused} end
redis.call('HSET', KEYS[1], 'metadata', ARGV[2])
append_items(#ARGV + 1, ARGV[3])
return with_size({'updated', redis.call('HGET', KEYS[1], 'created_at')})
