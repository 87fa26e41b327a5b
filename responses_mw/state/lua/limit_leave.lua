-- Counts one that was under way no more.
-- KEYS: zset of what is under way
-- ARGV: its name

redis.call('ZREM', KEYS[1], ARGV[1])
