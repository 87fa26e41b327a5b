-- Enters a job whose record is about to be written: should its creator die now, a claimer finds it when the time is over.
-- KEYS: ready
-- ARGV: job, owner, time in ms

if redis.call('HSETNX', prefix .. 'jobs', ARGV[1], ARGV[2]) == 1 then
  redis.call('ZADD', prefix .. 'leases', now_ms() + ARGV[3], ARGV[1])
end
