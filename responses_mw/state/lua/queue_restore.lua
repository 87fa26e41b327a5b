-- Add a job that is waiting according to its record but not in the queue: it was lost, or the partitions were changed.
-- KEYS: ready
-- ARGV: job, owner
-- Answers: 1 it was added; 0 it was there already

if redis.call('ZSCORE', KEYS[1], ARGV[1]) or redis.call('ZSCORE', prefix .. 'leases', ARGV[1]) then return 0 end
redis.call('HSET', prefix .. 'jobs', ARGV[1], ARGV[2])
wait_for_worker(KEYS[1], ARGV[1], ARGV[2], false)
return 1
