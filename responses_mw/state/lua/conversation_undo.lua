-- Undo a creation or an append that was given up. If it has not been executed yet, prevent that.
-- KEYS: conversation, tombstone of the write
-- ARGV: 1 owner, 2 TTL of the tombstone in ms, 3 whether the write created the conversation ('1' or ''), then the ids of the appended items
-- Returns: {'undone'}, and a report (lib.lua) if the owner has the conversation

redis.call('SET', KEYS[2], '', 'PX', ARGV[2])
if refusal(ARGV[1], true) then return {'undone'} end
if ARGV[3] == '1' then redis.call('DEL', KEYS[1], KEYS[1] .. ':items', KEYS[1] .. ':order') end
for i = 4, #ARGV do remove_item(ARGV[i]) end
return with_size({'undone'})
