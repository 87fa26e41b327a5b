-- Count an open stream or job of an owner, unless the maximum is reached.
-- KEYS: zset of names by the time (ms) when they expire
-- ARGV: 1 name, 2 maximum, 3 TTL in ms
-- Returns: 1 the stream or job is counted; 0 the maximum is reached

local now = now_ms()
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
if redis.call('ZSCORE', KEYS[1], ARGV[1]) or redis.call('ZCARD', KEYS[1]) < tonumber(ARGV[2]) then
  redis.call('ZADD', KEYS[1], now + ARGV[3], ARGV[1])
  keep(KEYS[1], ARGV[3])
  return 1
end
return 0
