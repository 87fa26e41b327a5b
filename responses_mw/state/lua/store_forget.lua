-- Forget the chunks of files and the vector space of their store, so that they can be ingested with another model.
-- KEYS: store
-- ARGV: 1 name of the store, then the name of each file and of its block. A file that has another block by now is left
-- Returns: {'forgotten'} and a report (lib.lua)

local reply = {'forgotten'}
local _, add_file = store_report(reply)
local forgotten = {}
redis.call('HDEL', KEYS[1], 'space', 'dimension')
for i = 2, #ARGV, 2 do
  local key = file_key(KEYS[1], ARGV[i])
  local before = redis.call('HMGET', key, 'block', 'bytes')
  if before[1] == ARGV[i + 1] then
    if redis.call('EXISTS', KEYS[1]) == 1 then redis.call('HINCRBY', KEYS[1], 'bytes', -before[2]) end
    redis.call('HDEL', key, unpack(BLOCK_FIELDS))
  end
  add_file(KEYS[1], ARGV[1], ARGV[i])
  forgotten[#forgotten + 1] = ARGV[i]
end
if redis.call('EXISTS', KEYS[1]) == 1 then change(KEYS[1], forgotten) end
return reply
