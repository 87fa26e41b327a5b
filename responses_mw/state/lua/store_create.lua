-- Create a vector store.
-- KEYS: store, index of the owner's stores, tombstone of this call
-- ARGV: 1 name of the store, 2 position in lists, 3 maximum number of stores, then the fields of the store and their values
-- Returns: {'created'} and a report (lib.lua); {'bound'}; {'missing'} (the call was given up and undone)

if redis.call('EXISTS', KEYS[3]) == 1 then return {'missing'} end
if redis.call('EXISTS', KEYS[1]) == 0 then
  if redis.call('ZCARD', KEYS[2]) >= tonumber(ARGV[3]) then return {'bound'} end
  redis.call('HSET', KEYS[1], 'v', VERSION, 'version', 0, unpack(ARGV, 4))
  redis.call('ZADD', KEYS[2], ARGV[2], ARGV[1])
end
local reply = {'created'}
local add_store = store_report(reply)
add_store(KEYS[1], ARGV[1])
return reply
