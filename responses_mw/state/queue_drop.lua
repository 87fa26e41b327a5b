-- Forgets a job that has ended.
-- KEYS: ready
-- ARGV: job

redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('ZREM', prefix .. 'leases', ARGV[1])
redis.call('HDEL', prefix .. 'jobs', ARGV[1])
