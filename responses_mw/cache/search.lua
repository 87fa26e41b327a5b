-- Has the server's index find the nearest of a partition, and reads them.
-- KEYS: generation
-- ARGV: index, space, query, vector, at most so many, the least similarity
-- Answers id, vector, record and ms left for each

local answer = {}
local found = redis.pcall('FT.SEARCH', ARGV[1], ARGV[3], 'PARAMS', 2, 'vector', ARGV[4], 'RETURN', 1, 'distance',
  'LIMIT', 0, ARGV[5], 'DIALECT', 2)
if found.err then return redis.error_reply(found.err) end
local place = vector_key(ARGV[2], '')
for i = 2, #found, 2 do
  local name, values = found[i], found[i + 1]
  local similarity = -1
  for j = 1, #values, 2 do  -- valkey-search tells more than it is asked for
    if values[j] == 'distance' then similarity = 1 - values[j + 1] end
  end
  -- Keys of another owner's shard are none of ours, whatever is written in them.
  if similarity >= tonumber(ARGV[6]) and string.sub(name, 1, #place) == place then
    local id = string.sub(name, #place + 1)
    local record, left = read(id)
    if record then answer[#answer + 1] = {id, redis.call('HGET', name, 'vector'), record, left} end
  end
end
return answer
