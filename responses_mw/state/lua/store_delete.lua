-- Delete the record of a vector store. Its files are erased later (store_detach.lua).
-- KEYS: store, index of the owner's stores, tombstone
-- ARGV: 1 name of the store, 2 lifetime in ms of a tombstone, which makes a later create fail (0: none)
-- Returns: {'deleted'} and a report (lib.lua); {'missing'} and a report

free(KEYS[1] .. ':none')
if ARGV[2] ~= '0' then redis.call('SET', KEYS[3], 1, 'PX', ARGV[2]) end
local found = redis.call('DEL', KEYS[1])
redis.call('DEL', KEYS[1] .. ':changes')
redis.call('ZREM', KEYS[2], ARGV[1])
local reply = {found == 1 and 'deleted' or 'missing'}
local add_store = store_report(reply)
add_store(KEYS[1], ARGV[1])
return reply
