-- Add files to a vector store, to be ingested. A file that the store has already is ingested again, and found as before meanwhile.
-- KEYS: store, index of the store's files, records of the owner's files
-- ARGV: 1 name of the store, 2 batch ('' for none), 3 lifetime of a batch in ms, 4 maximum number of files, 5 time in Unix seconds,
--   6 position in lists, 7 generation, then name, file name, attributes and chunking of each file
-- Returns: {'attached'} and a report (lib.lua); {'missing'}, {'newer'}, {'expired'}; {'bound'}; {'file', name of a file that is gone}

local refused = store_refusal(KEYS[1])
if refused then return {refused} end
local new = 0
for i = 8, #ARGV, 4 do
  if redis.call('HEXISTS', KEYS[3], ARGV[i]) == 0 then return {'file', ARGV[i]} end
  if not redis.call('ZSCORE', KEYS[2], ARGV[i]) then new = new + 1 end
end
if redis.call('ZCARD', KEYS[2]) + new > tonumber(ARGV[4]) then return {'bound'} end

local function position(i) return string.format('%.0f', ARGV[6] + i) end
local batch = ARGV[2] ~= '' and batch_key(KEYS[1], ARGV[2])
if batch and redis.call('EXISTS', batch) == 0 then redis.call('HSET', batch, 'v', VERSION, 'created_at', ARGV[5]) end
local reply = {'attached'}
local _, add_file, add_batch = store_report(reply)
local changed = {}
for i = 8, #ARGV, 4 do
  local file, key = ARGV[i], file_key(KEYS[1], ARGV[i])
  repair(key)
  if redis.call('HGET', key, 'generation') ~= ARGV[7] then  -- else this call was repeated
    local before = redis.call('HMGET', key, 'status', 'batch')
    if before[1] == 'in_progress' and before[2] ~= '' then count(batch_key(KEYS[1], before[2]), before[1], 'cancelled') end
    redis.call('HSETNX', key, 'created_at', ARGV[5])
    redis.call('HSET', key, 'v', VERSION, 'status', 'in_progress', 'generation', ARGV[7], 'batch', ARGV[2])
    redis.call('HSET', key, 'filename', ARGV[i + 1], 'attributes', ARGV[i + 2], 'chunking', ARGV[i + 3])
    redis.call('HDEL', key, 'code', 'message')
    redis.call('ZADD', KEYS[2], 'NX', position(i), file)
    redis.call('SADD', prefix .. 'of:' .. file, ARGV[1])
    count(KEYS[1], before[1] or nil, 'in_progress')
    if batch then
      count(batch, nil, 'in_progress')
      redis.call('ZADD', batch .. ':files', position(i), file)
    end
  end
  add_file(KEYS[1], ARGV[1], file)
  changed[#changed + 1] = file
end
if batch then
  redis.call('PEXPIRE', batch, ARGV[3])
  redis.call('PEXPIRE', batch .. ':files', ARGV[3])
  add_batch(KEYS[1], ARGV[1], ARGV[2], ARGV[3])
end
redis.call('HSET', KEYS[1], 'active', ARGV[5])
change(KEYS[1], changed)
return reply
