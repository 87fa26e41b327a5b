-- Look items up that were made in one response, or directly in the conversation with the same tag.
-- KEYS: record, conversation
-- ARGV: owner, most bytes, 1 for the response's turn as well, then the items' ids
-- Answers: {turn of the response or nil, blob or nil for each id}, or 'bound' where they are more

local left = tonumber(ARGV[2])
local function counted(blob)
  left = left - (blob and #blob or 0)
  return blob
end

local record = redis.call('HMGET', KEYS[1], 'owner', 'segment', 'length')
local found = {false}
if ARGV[3] == '1' and record[1] == ARGV[1] and record[2] then
  found[1] = counted(redis.call('LINDEX', prefix .. 's:' .. record[2], record[3] - 1))
end
local shared = redis.call('HGET', KEYS[2], 'owner') == ARGV[1]
for i = 4, #ARGV do
  found[i - 2] = shared and counted(redis.call('HGET', KEYS[2] .. ':items', ARGV[i]))
  if left < 0 then return 'bound' end
end
return found
