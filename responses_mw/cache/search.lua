-- Has the server's index find the nearest of a partition, and reads them.
-- KEYS: generation
-- ARGV: index, space, partition, head ('' to do without), vector, so many, the least similarity
-- Answers whether heads told, and id, vector, record and ms left of so many at least; some may be less similar, if heads told.
-- Where records are large, the last come without ('')

local ALONG = 65536  -- bytes of records after which no more come along
local space, partition, most, least = ARGV[2], ARGV[3], tonumber(ARGV[6]), tonumber(ARGV[7])
local place = vector_key(space, '')

-- The names of at most so many with that similarity; an error where there is no index.
local function nearest(field, vector, count)
  local query = string.format('(@partition:{%s})=>[KNN %d @%s $vector AS distance]', partition, count, field)
  local found = redis.pcall('FT.SEARCH', ARGV[1], query, 'PARAMS', 2, 'vector', vector, 'RETURN', 1, 'distance',
    'LIMIT', 0, count, 'DIALECT', 2)
  if found.err then return found end
  local names = {}
  for i = 2, #found, 2 do
    local similarity, values = -1, found[i + 1]
    for j = 1, #values, 2 do  -- valkey-search tells more than it is asked for
      if values[j] == 'distance' then similarity = 1 - values[j + 1] end
    end
    if similarity >= least then names[#names + 1] = found[i] end
  end
  return names
end

-- Heads are at least as similar as vectors, and read in a fraction of the time. Where too many are similar, they tell nothing.
local names = ARGV[4] ~= '' and nearest('head', ARGV[4], 2 * most)
local told = names and #names < 2 * most
if not told then names = nearest('vector', ARGV[5], most) end
if names.err then return redis.error_reply(names.err) end

local entries, bytes = {}, 0
for _, name in ipairs(names) do
  -- Keys of another owner's shard are none of ours, whatever is written in them.
  if string.sub(name, 1, #place) == place then
    local id, record, left = string.sub(name, #place + 1), '', 0
    local vector = redis.call('HGET', name, 'vector')
    if bytes < ALONG then record, left = read(id) end
    if vector and record then
      entries[#entries + 1] = {id, vector, record, left}
      bytes = bytes + #record
    end
  end
end
return {told and 1 or 0, entries}
