-- Delete an item of a conversation.
-- KEYS: conversation
-- ARGV: owner, item id
-- Returns: {'deleted', created_at, metadata} and a report (lib.lua); {'missing'}; {'newer'}; {'cursor'} (no such id)

local refused = refusal(ARGV[1])
if refused then return {refused} end
if not remove_item(ARGV[2]) then return {'cursor'} end
return with_size({'deleted', unpack(redis.call('HMGET', KEYS[1], 'created_at', 'metadata'))})
