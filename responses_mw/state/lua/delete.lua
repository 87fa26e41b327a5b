-- Delete a response and the turns that no remaining object needs, or undo a commit. If the commit has not been executed yet,
-- prevent that.
-- KEYS: record, tombstone
-- ARGV: 1 owner, 2 token of this call, 3 TTL of the tombstone in ms, 4 token of the commit to undo or '', then the ids of the
--   items that it appended to its conversation
-- Returns: {'deleted'} and a report (lib.lua); {'missing'}; {'newer'}

local LAST_READS = 10000  -- ms that followers of the log have to read its end

local undone = ARGV[4] ~= '' and ARGV[4]
local record = redis.call('HMGET', KEYS[1], 'v', 'owner', 'segment', 'token', 'temporary')
if not record[1] then
  if undone then redis.call('SET', KEYS[2], ARGV[2], 'NX', 'PX', ARGV[3]) end
  return {redis.call('GET', KEYS[2]) == ARGV[2] and 'deleted' or 'missing'}
end
if record[2] ~= ARGV[1] or undone and record[4] ~= undone then return {'missing'} end
if tonumber(record[1]) > VERSION then return {'newer'} end

free(KEYS[1])
redis.call('SET', KEYS[2], ARGV[2], 'PX', record[5] or ARGV[3])
local random = string.match(KEYS[1], '[a-z0-9]+$')
redis.call('DEL', prefix .. 'k:' .. random, prefix .. 't:' .. random)
redis.call('PEXPIRE', prefix .. 'e:' .. random, LAST_READS)
if record[3] then
  redis.call('ZREM', prefix .. 's:' .. record[3] .. ':refs', 'r' .. random)
  settle(record[3])
end
for i = 5, #ARGV do remove_item(ARGV[i]) end
local reply = {'deleted'}
local add = report(reply)
add('r' .. random, KEYS[2], TOMBSTONE_BYTES)
add('e' .. random, prefix .. 'e:' .. random, 0)
if #ARGV > 4 then add('c', prefix .. 'c', conversation_size()) end
for _, segment in ipairs(settled) do
  local turns = prefix .. 's:' .. segment
  local bytes = redis.call('GET', turns .. ':bytes')
  -- A segment whose size was never computed is not in the account.
  if bytes or redis.call('EXISTS', turns) == 0 then add('s' .. segment, turns, SEGMENT_BYTES + (bytes or 0)) end
end
return reply
