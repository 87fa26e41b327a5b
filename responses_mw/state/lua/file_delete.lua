-- Delete the record of a file and, if they are in Redis, its bytes.
-- KEYS: records, index, tombstone, bytes
-- ARGV: 1 name of the file, 2 lifetime in ms of a tombstone, which makes a later create fail (0: none)
-- Returns: {'deleted'} and a report (lib.lua); {'missing'} and a report

if ARGV[2] ~= '0' then redis.call('SET', KEYS[3], 1, 'PX', ARGV[2]) end
local found = redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('ZREM', KEYS[2], ARGV[1])
redis.call('DEL', KEYS[4])
local time = redis.call('TIME')
return {found == 1 and 'deleted' or 'missing', time[1] * 1000000 + time[2], ARGV[1], 0, 0}
