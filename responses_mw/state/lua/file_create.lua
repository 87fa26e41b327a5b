-- Store the record of a file whose bytes have been stored.
-- KEYS: records, index, tombstone of this call
-- ARGV: 1 name of the file, 2 record, 3 position in lists, 4 bytes that count, 5 TTL in ms in the account, 6 maximum number of files
-- Returns: {'created'} and a report (lib.lua); {'bound'}; {'missing'} (the call was given up and undone)

if redis.call('EXISTS', KEYS[3]) == 1 then return {'missing'} end
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 and redis.call('ZCARD', KEYS[2]) >= tonumber(ARGV[6]) then return {'bound'} end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('ZADD', KEYS[2], ARGV[3], ARGV[1])
local time = redis.call('TIME')
return {'created', time[1] * 1000000 + time[2], ARGV[1], tonumber(ARGV[4]), tonumber(ARGV[5])}
