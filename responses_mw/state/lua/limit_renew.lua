-- Extend the entries of an owner that still exist.
-- KEYS: zset of names by the time (ms) when they expire
-- ARGV: TTL in ms, names

local until_then = now_ms() + ARGV[1]
for i = 2, #ARGV do redis.call('ZADD', KEYS[1], 'XX', until_then, ARGV[i]) end
keep(KEYS[1], ARGV[1])
