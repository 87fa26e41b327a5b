-- Add a job whose record is about to be written. If its creator fails before that, a worker claims the job after the given time.
-- KEYS: ready
-- ARGV: job, owner, time in ms

if redis.call('HEXISTS', prefix .. 'jobs', ARGV[1]) == 0 then
  redis.call('ZADD', prefix .. 'leases', now_ms() + ARGV[3], ARGV[1])  -- first: if the key is damaged, nothing is added
  redis.call('HSET', prefix .. 'jobs', ARGV[1], ARGV[2])
end
