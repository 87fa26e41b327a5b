-- Release a background response, either without counting an attempt, or for a retry after the upstream returned an error.
-- KEYS: record
-- ARGV: 1 token, 2 how often its answer was continued after an interruption; after an error also 3 the error as JSON,
--   4 ms from the first error to the end of retries, 5 whether this was an attempt ('1' or '')
-- Returns: 'released'; 'fenced'

local BEGUN = 3  -- created, queued and in_progress are not output

local record = redis.call('HMGET', KEYS[1], 'token', 'status', 'next_seq', 'retry_seq', 'temporary')
if record[1] ~= ARGV[1] or TERMINAL[record[2]] then return 'fenced' end
redis.call('HSET', KEYS[1], 'token', '', 'lease_until', now_ms(), 'continuations', ARGV[2])
if ARGV[5] ~= '1' then
  redis.call('HINCRBY', KEYS[1], 'attempts', -1)
  redis.call('HINCRBY', KEYS[1], 'total', -1)
end
if ARGV[3] then
  if record[3] ~= record[4] then redis.call('HDEL', KEYS[1], 'retry_until', 'retries') end  -- the job has made progress since
  redis.call('HSET', KEYS[1], 'looked', now_ms(), 'error', ARGV[3], 'erred', 1, 'retry_seq', record[3])
  if tonumber(record[3]) <= BEGUN then redis.call('HSET', KEYS[1], 'status', 'queued') end
  redis.call('HSETNX', KEYS[1], 'retry_until', now_ms() + ARGV[4])
  redis.call('HINCRBY', KEYS[1], 'retries', 1)
end
prolong(KEYS[1], record[5])
return 'released'
