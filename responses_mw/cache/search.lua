-- Has the server's index find the nearest of a partition, and reads them.
-- KEYS: generation
-- ARGV: index, space, partition, field ('head' or 'vector'), vector, at most so many, the least similarity
-- Answers id, vector, record and ms left of each. By their heads some may be less similar; where so many are similar by these that
-- others may be more so, the answer is nil. Where records are large, the last come without ('')

local ALONG = 65536  -- bytes of records after which no more come along
local field, most, least = ARGV[4], tonumber(ARGV[6]), tonumber(ARGV[7])

local query = string.format('(@partition:{%s})=>[KNN %d @%s $vector AS distance]', ARGV[3], most, field)
local found = redis.pcall('FT.SEARCH', ARGV[1], query, 'PARAMS', 2, 'vector', ARGV[5], 'RETURN', 1, 'distance',
  'LIMIT', 0, most, 'DIALECT', 2)
if found.err then return redis.error_reply(found.err) end

local names = {}
for i = 2, #found, 2 do
  local similarity, values = -1, found[i + 1]
  for j = 1, #values, 2 do  -- valkey-search tells more than it is asked for
    if values[j] == 'distance' then similarity = 1 - values[j + 1] end
  end
  if similarity >= least then names[#names + 1] = found[i] end
end
if field == 'head' and #names == most then return false end

local place = vector_key(ARGV[2], '')
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
return entries
