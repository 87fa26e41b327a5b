-- Append items to a conversation as one block.
-- KEYS: conversation, tombstone of this call
-- ARGV: 1 owner, 2 TTL in ms, 3 maximum items, 4 maximum bytes, then id and blob of each item
-- Returns: {'appended'} and a report (lib.lua); {'missing'} (also if the call was given up and undone); {'newer'}; {'bound'}

local refused = redis.call('EXISTS', KEYS[2]) == 1 and 'missing' or refusal(ARGV[1])
if refused then return {refused} end
if not has_room(5, tonumber(ARGV[3]), tonumber(ARGV[4])) then return {'bound'} end
append_items(5, ARGV[2])
return with_size({'appended'})
