-- Compare the check values of a replica's secret keys with the stored values, and store the value of the key that encrypts.
-- KEYS: check values
-- ARGV: TTL in ms, then the values, beginning with the value of the key that encrypts
-- Returns: 1 no value is stored yet, or this replica knows one of them; 0 the keys differ

local stored, mine, agree = redis.call('SMEMBERS', KEYS[1]), {}, false
for i = 2, #ARGV do mine[ARGV[i]] = true end
for _, value in ipairs(stored) do agree = agree or mine[value] end
if #stored > 0 and not agree then return 0 end

for _, value in ipairs(stored) do
  -- A key that is unknown here was retired. A replica that has only this key is outdated.
  if not mine[value] then redis.call('SREM', KEYS[1], value) end
end
redis.call('SADD', KEYS[1], ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return 1
