-- Add a batch of usage to the counters of a day.
-- KEYS: counters of the day (hash), mark of the batch
-- ARGV: maximum number of owners, name for further owners, TTL in s, then name and four numbers of each owner
-- Returns: 1 if the batch was added, 0 if it had been added before

if redis.call('EXISTS', KEYS[2]) == 1 then return 0 end
local maximum, others = tonumber(ARGV[1]), ARGV[2]
local count = redis.call('HLEN', KEYS[1])
for i = 4, #ARGV, 5 do
  local owner = ARGV[i]
  local known = redis.call('HGET', KEYS[1], owner)
  if not known and count >= maximum and owner ~= others then
    owner = others
    known = redis.call('HGET', KEYS[1], owner)
  end
  if not known then count = count + 1 end
  local sums = {}
  for number in string.gmatch(known or '0 0 0 0', '%d+') do
    local n = #sums + 1
    sums[n] = string.format('%.0f', tonumber(number) + tonumber(ARGV[i + n]))
  end
  redis.call('HSET', KEYS[1], owner, table.concat(sums, ' '))
end
redis.call('EXPIRE', KEYS[1], ARGV[3])
redis.call('SET', KEYS[2], 1, 'EX', 3600)
return 1
