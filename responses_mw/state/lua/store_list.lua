-- Return a page of the records in an index: of stores, of the files of a store, or of the files of a batch.
-- KEYS: index
-- ARGV: 1 name of the record before the page ('' for the first page), 2 number of records, 3 'asc' or 'desc', 4 the key of a
--   record without its name
-- Returns: name and fields of each record (without fields if it is gone); nil if there is no record with the name

local rank, range = 'ZRANK', 'ZRANGE'
if ARGV[3] == 'desc' then rank, range = 'ZREVRANK', 'ZREVRANGE' end
local first = 0
if ARGV[1] ~= '' then
  local at = redis.call(rank, KEYS[1], ARGV[1])
  if not at then return false end
  first = at + 1
end
local reply = {}
for _, name in ipairs(redis.call(range, KEYS[1], first, first + ARGV[2] - 1)) do
  reply[#reply + 1] = name
  reply[#reply + 1] = read_fields(ARGV[4] .. name)
end
return reply
