-- Delete a conversation and its items, but not the responses that were made in it.
-- KEYS: conversation
-- ARGV: owner
-- Returns: {'deleted'} and a report (lib.lua); {'missing'}; {'newer'}

local refused = refusal(ARGV[1], true)
if refused then return {refused} end
redis.call('DEL', KEYS[1], KEYS[1] .. ':items', KEYS[1] .. ':order')
return with_size({'deleted'})
