-- Return items of a conversation, in order.
-- KEYS: conversation
-- ARGV: 1 owner, 2 'asc' or 'desc', 3 id of the item to begin after, or '', 4 maximum items (-1: all),
--   5 counter of the last item to return or '+inf'
-- Returns: {'ok', counter of the newest item, blobs...}; {'missing'}; {'newer'}; {'cursor'} (no such id)

local refused = refusal(ARGV[1])
if refused then return {refused} end
local items, order = KEYS[1] .. ':items', KEYS[1] .. ':order'
local descending = ARGV[2] == 'desc'
local first, last = '-inf', ARGV[5]
if ARGV[3] ~= '' then
  local at = redis.call('ZSCORE', order, ARGV[3])
  if not at then return {'cursor'} end
  if descending then last = '(' .. at else first = '(' .. at end
end
local ids
if descending then
  ids = redis.call('ZREVRANGEBYSCORE', order, last, first, 'LIMIT', 0, ARGV[4])
else
  ids = redis.call('ZRANGEBYSCORE', order, first, last, 'LIMIT', 0, ARGV[4])
end
local reply = {'ok', redis.call('HGET', KEYS[1], 'last')}
for i, id in ipairs(ids) do reply[i + 2] = redis.call('HGET', items, id) end
return reply
