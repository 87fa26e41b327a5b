-- Enter a job whose record is about to be written: if its creator dies now, a claimer finds it after the given time.
-- KEYS: ready
-- ARGV: job, owner, time in ms

if redis.call('HEXISTS', prefix .. 'jobs', ARGV[1]) == 0 then
  redis.call('ZADD', prefix .. 'leases', now_ms() + ARGV[3], ARGV[1])  -- first: if it is damaged, nothing is entered
  redis.call('HSET', prefix .. 'jobs', ARGV[1], ARGV[2])
end
