-- Look up items that a response created, or that were added to the conversation with the same tag.
-- KEYS: record, conversation
-- ARGV: 1 owner, 2 maximum bytes as stored, then the items' ids
-- Returns: {turn of the response or nil, blob or nil for each id}; 'bound' if the turn and the items exceed the maximum

local left = tonumber(ARGV[2])
local function count(blob)
  left = left - (blob and #blob or 0)
  return blob
end

local record = redis.call('HMGET', KEYS[1], 'owner', 'segment', 'length')
local found = {false}
if record[1] == ARGV[1] and record[2] then
  found[1] = count(redis.call('LINDEX', prefix .. 's:' .. record[2], record[3] - 1))
end
local shared = redis.call('HGET', KEYS[2], 'owner') == ARGV[1]
for i = 3, #ARGV do
  found[i - 1] = shared and count(redis.call('HGET', KEYS[2] .. ':items', ARGV[i]))
  if left < 0 then return 'bound' end
end
return found
