-- Return a page of files.
-- KEYS: records, index
-- ARGV: 1 name of the file before the page ('' for the first page), 2 number of files, 3 'asc' or 'desc'
-- Returns: name and record of each file; nil if there is no file with the name

local rank, range = 'ZRANK', 'ZRANGE'
if ARGV[3] == 'desc' then rank, range = 'ZREVRANK', 'ZREVRANGE' end
local first = 0
if ARGV[1] ~= '' then
  local at = redis.call(rank, KEYS[2], ARGV[1])
  if not at then return false end
  first = at + 1
end
local names = redis.call(range, KEYS[2], first, first + ARGV[2] - 1)
if #names == 0 then return {} end
local reply = {}
for i, record in ipairs(redis.call('HMGET', KEYS[1], unpack(names))) do
  reply[#reply + 1] = names[i]
  reply[#reply + 1] = record
end
return reply
