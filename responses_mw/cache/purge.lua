-- Empties a shard. From the first call on nothing is found in it any more, and no answer that was begun before is kept.
-- KEYS: generation
-- ARGV: 1 on the first call, ms for which the new generation is remembered, at most so many to remove
-- Answers how many were removed, and how many are left

if ARGV[1] == '1' then
  redis.call('INCR', KEYS[1])
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
local ids = redis.call('ZRANGE', prefix .. 'i', 0, ARGV[3] - 1)
for _, id in ipairs(ids) do drop(id) end
return {#ids, redis.call('ZCARD', prefix .. 'i')}
