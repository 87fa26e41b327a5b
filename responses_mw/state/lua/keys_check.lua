-- Compares check values of a replica's secret keys with those that others stored, and stores that of its newest.
-- KEYS: check values
-- ARGV: TTL in ms, then the values, that of the newest key first
-- Answers: 1 none is stored yet, or one of those that are is known here; 0 the keys are others

local stored, mine, agree = redis.call('SMEMBERS', KEYS[1]), {}, false
for i = 2, #ARGV do mine[ARGV[i]] = true end
for _, value in ipairs(stored) do agree = agree or mine[value] end
if #stored > 0 and not agree then return 0 end

for _, value in ipairs(stored) do
  -- A key that is no longer known here was retired: whoever has but that one is behind.
  if not mine[value] then redis.call('SREM', KEYS[1], value) end
end
redis.call('SADD', KEYS[1], ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return 1
