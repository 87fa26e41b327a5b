-- Record that the chunks of a file are damaged: they are not visible any more, and the file has failed.
-- KEYS: store
-- ARGV: 1 name of the store, 2 name of the file, 3 its block, 4 code and 5 message of the failure
-- Returns: {'settled'} and a report (lib.lua); {'fenced'} (the file has another block by now)

local key = file_key(KEYS[1], ARGV[2])
local before = redis.call('HMGET', key, 'status', 'block', 'bytes')
if redis.call('EXISTS', KEYS[1]) == 0 or before[2] ~= ARGV[3] then return {'fenced'} end
if before[1] == 'completed' then
  set_status(KEYS[1], ARGV[2], 'failed')
  redis.call('HSET', key, 'code', ARGV[4], 'message', ARGV[5])
end
redis.call('HINCRBY', KEYS[1], 'bytes', -(before[3] or 0))
redis.call('HDEL', key, unpack(BLOCK_FIELDS))
change(KEYS[1], {ARGV[2]})
local reply = {'settled'}
local _, add_file = store_report(reply)
add_file(KEYS[1], ARGV[1], ARGV[2])
return reply
