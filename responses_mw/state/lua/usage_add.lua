-- Add a batch of usage to the counters of a day.
-- KEYS: counters of the day by owner (hash), mark of the batch, counters of the day by owner and model (hash)
-- ARGV: maximum number of owners, name for further owners and models, TTL in s, maximum number of models of an owner, number
--       of fields of the last key above which no model is added, then owner, model and five numbers of each row
-- Returns: 1 if the batch was added, 0 if it had been added before
--
-- The field of a row is "<owner> <model>", and the field "<owner>" has the number of the owner's models. Of the five numbers, the
-- counters by owner have only the first four, because older versions refuse more. A row may have further numbers, which a newer
-- version has added. They are kept.

if redis.call('EXISTS', KEYS[2]) == 1 then return 0 end
local max_owners, others, max_models, max_fields = tonumber(ARGV[1]), ARGV[2], tonumber(ARGV[4]), tonumber(ARGV[5])
local owners, fields = redis.call('HLEN', KEYS[1]), redis.call('HLEN', KEYS[3])  -- an error here means that nothing is added

local function add(key, field, first, count)
  local sums = {}
  for number in string.gmatch(redis.call('HGET', key, field) or '', '%d+') do sums[#sums + 1] = number end
  for n = 1, count do
    sums[n] = string.format('%.0f', tonumber(sums[n] or 0) + tonumber(ARGV[first + n - 1]))
  end
  redis.call('HSET', key, field, table.concat(sums, ' '))
end

for i = 6, #ARGV, 7 do
  local owner, model = ARGV[i], ARGV[i + 1]
  if redis.call('HEXISTS', KEYS[1], owner) == 0 then
    if owners >= max_owners then owner = others end
    owners = owners + 1 - redis.call('HEXISTS', KEYS[1], owner)
  end
  add(KEYS[1], owner, i + 2, 4)
  if redis.call('HEXISTS', KEYS[3], owner .. ' ' .. model) == 0 then
    local models = tonumber(redis.call('HGET', KEYS[3], owner) or 0)
    if models >= max_models or fields >= max_fields then model = others end
    if redis.call('HEXISTS', KEYS[3], owner .. ' ' .. model) == 0 then
      redis.call('HSET', KEYS[3], owner, models + 1)
      fields = fields + (models == 0 and 2 or 1)
    end
  end
  add(KEYS[3], owner .. ' ' .. model, i + 2, 5)
end
redis.call('EXPIRE', KEYS[1], ARGV[3])
redis.call('EXPIRE', KEYS[3], ARGV[3])
redis.call('SET', KEYS[2], 1, 'EX', 3600)
return 1
