-- Empty a shard. The first call hides all entries and prevents answers computed before it from being stored.
-- KEYS: generation
-- ARGV: 1 '1' on the first call, minimum lifetime of the new generation in ms, maximum number of entries to remove
-- Returns the numbers of removed and of remaining entries

if ARGV[1] == '1' then
  redis.call('INCR', KEYS[1])
  -- If the purge is interrupted, the remaining entries stay hidden until they expire.
  redis.call('PEXPIRE', KEYS[1], math.max(ARGV[2], redis.call('PTTL', prefix .. 'i')))
end
local ids = redis.call('ZRANGE', prefix .. 'i', 0, ARGV[3] - 1)
for _, id in ipairs(ids) do drop(id) end
return {#ids, redis.call('ZCARD', prefix .. 'i')}
