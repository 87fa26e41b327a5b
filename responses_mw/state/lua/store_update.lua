-- Change fields of a vector store.
-- KEYS: store
-- ARGV: 1 name of the store, 2 number of fields to delete, then their names, then fields and their new values
-- Returns: {'updated'} and a report (lib.lua); {'missing'}; {'newer'}; {'expired'}

local refused = store_refusal(KEYS[1])
if refused then return {refused} end
local deleted = tonumber(ARGV[2])
if deleted > 0 then redis.call('HDEL', KEYS[1], unpack(ARGV, 3, 2 + deleted)) end
if #ARGV > 2 + deleted then redis.call('HSET', KEYS[1], unpack(ARGV, 3 + deleted)) end
local reply = {'updated'}
local add_store = store_report(reply)
add_store(KEYS[1], ARGV[1])
return reply
