-- Hand a background response back: as if it had not been taken, or to be tried again after an error of the upstream.
-- KEYS: record
-- ARGV: 1 token; after an error also 2 the error as JSON, 3 ms from the first error on for which it is tried again,
--   4 whether this was an attempt ('1' or '')
-- Answers: 'released'; 'fenced'

local record = redis.call('HMGET', KEYS[1], 'token', 'status')
if record[1] ~= ARGV[1] or TERMINAL[record[2]] then return 'fenced' end
redis.call('HSET', KEYS[1], 'token', '', 'lease_until', 0)
if ARGV[4] ~= '1' then redis.call('HINCRBY', KEYS[1], 'attempts', -1) end
if ARGV[2] then
  redis.call('HSET', KEYS[1], 'status', 'queued', 'looked', now_ms(), 'error', ARGV[2])
  redis.call('HSETNX', KEYS[1], 'retry_until', now_ms() + ARGV[3])
  redis.call('HINCRBY', KEYS[1], 'retries', 1)
end
return 'released'
