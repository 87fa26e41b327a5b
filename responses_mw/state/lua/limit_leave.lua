-- Stop counting a stream or job.
-- KEYS: zset of names by the time (ms) when they expire
-- ARGV: its name

redis.call('ZREM', KEYS[1], ARGV[1])
