-- Where items may be that were made in one response, or straight in the conversation of the same tag.
-- KEYS: record, conversation
-- ARGV: owner, then the items' ids
-- Answers: {turn of the response or nil, blob or nil for each id}

local record = redis.call('HMGET', KEYS[1], 'owner', 'segment', 'length')
local found = {false}
if record[1] == ARGV[1] and record[2] then
  found[1] = redis.call('LINDEX', prefix .. 's:' .. record[2], record[3] - 1)
end
local shared = redis.call('HGET', KEYS[2], 'owner') == ARGV[1]
for i = 2, #ARGV do
  found[i] = shared and redis.call('HGET', KEYS[2] .. ':items', ARGV[i])
end
return found
