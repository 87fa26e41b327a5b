-- Enters a job that waits by its record and is not in the queue: the queue lost it, or had other partitions then.
-- KEYS: ready
-- ARGV: job, owner
-- Answers: 1 it was entered; 0 it was there

if redis.call('ZSCORE', KEYS[1], ARGV[1]) or redis.call('ZSCORE', prefix .. 'leases', ARGV[1]) then return 0 end
redis.call('HSET', prefix .. 'jobs', ARGV[1], ARGV[2])
wait_for_worker(KEYS[1], ARGV[1], ARGV[2], false)
return 1
