-- Return the files of a vector store that have changed.
-- KEYS: store, index of its changed files by version
-- ARGV: 1 version that the caller knows, 2 maximum number of files
-- Returns: name and fields of each file (without fields if it was removed); nil if there are more files, or if some are forgotten

local forgotten = redis.call('HGET', KEYS[1], 'forgotten')
if forgotten and tonumber(forgotten) > tonumber(ARGV[1]) then return false end
local names = redis.call('ZRANGEBYSCORE', KEYS[2], '(' .. ARGV[1], '+inf', 'LIMIT', 0, ARGV[2] + 1)
if #names > tonumber(ARGV[2]) then return false end
local reply = {}
for _, name in ipairs(names) do
  reply[#reply + 1] = name
  reply[#reply + 1] = read_fields(file_key(KEYS[1], name))
end
return reply
