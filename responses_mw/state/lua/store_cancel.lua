-- Cancel the ingestion of the files of a batch that are in progress. What a worker publishes later is not wanted any more.
-- KEYS: store, batch, index of the batch's files
-- ARGV: 1 name of the batch
-- Returns: 'cancelled', or 'missing'

if redis.call('EXISTS', KEYS[2]) == 0 then return 'missing' end
redis.call('HSET', KEYS[2], 'is_cancelled', 1)
for _, file in ipairs(redis.call('ZRANGE', KEYS[3], 0, -1)) do
  local key = file_key(KEYS[1], file)
  local before = redis.call('HMGET', key, 'status', 'batch')
  if before[1] == 'in_progress' and before[2] == ARGV[1] then
    set_status(KEYS[1], file, 'cancelled')
    redis.call('HSET', key, 'generation', '')
  end
end
return 'cancelled'
