-- Has those of an owner that are still counted count on.
-- KEYS: zset of what is under way
-- ARGV: how long from now, in ms; names

local until_then = now_ms() + ARGV[1]
for i = 2, #ARGV do redis.call('ZADD', KEYS[1], 'XX', until_then, ARGV[i]) end
keep(KEYS[1], ARGV[1])
