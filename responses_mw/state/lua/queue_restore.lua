-- Add a job that is waiting according to its record but is not in the queue, because a failover removed it.
-- KEYS: ready
-- ARGV: job, owner
-- Returns: 1 the job was added; 0 the job was in the queue

if redis.call('ZSCORE', KEYS[1], ARGV[1]) or redis.call('ZSCORE', prefix .. 'leases', ARGV[1]) then return 0 end
redis.call('HSET', prefix .. 'jobs', ARGV[1], ARGV[2])
wait_for_worker(KEYS[1], ARGV[1], ARGV[2], false)
return 1
