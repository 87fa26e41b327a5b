-- Count the contents of a shard.
-- KEYS: generation
-- Returns entries, bytes, partitions

local entries = redis.call('ZCOUNT', prefix .. 'i', '(' .. now_ms(), '+inf')
local bytes = tonumber(redis.call('HGET', prefix .. 't', 'all') or 0)
local fields = redis.call('HLEN', prefix .. 't')
return {entries, bytes, bytes > 0 and fields - 1 or 0}
