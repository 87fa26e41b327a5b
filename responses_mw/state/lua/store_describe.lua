-- Replace the attributes of a file in a vector store.
-- KEYS: store
-- ARGV: 1 name of the store, 2 name of the file, 3 attributes
-- Returns: {'updated'} and a report (lib.lua); {'missing'}; {'newer'}; {'expired'}

local refused = store_refusal(KEYS[1])
local key = file_key(KEYS[1], ARGV[2])
if refused or redis.call('EXISTS', key) == 0 then return {refused or 'missing'} end
redis.call('HSET', key, 'attributes', ARGV[3])
change(KEYS[1], {ARGV[2]})
local reply = {'updated'}
local _, add_file = store_report(reply)
add_file(KEYS[1], ARGV[1], ARGV[2])
return reply
