-- Deletes a response, and the turns that nothing living stands on any more.
-- KEYS: record, tombstone
-- ARGV: owner, token of this delete, life of the tombstone in ms
-- Answers: 'deleted'; 'missing'; 'newer'

local LAST_READS = 10000  -- ms: whoever follows the log reads its end

local record = redis.call('HMGET', KEYS[1], 'v', 'owner', 'segment')
if not record[1] then
  return redis.call('GET', KEYS[2]) == ARGV[2] and 'deleted' or 'missing'
end
if record[2] ~= ARGV[1] then return 'missing' end
if tonumber(record[1]) > VERSION then return 'newer' end

-- What frees memory comes first: a full Redis lets a script write on that has begun so.
redis.call('DEL', KEYS[1])
redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[3])
local random = string.match(KEYS[1], '[a-z0-9]+$')
redis.call('DEL', prefix .. 'k:' .. random)
redis.call('PEXPIRE', prefix .. 'e:' .. random, LAST_READS)
if record[3] then
  redis.call('ZREM', prefix .. 's:' .. record[3] .. ':refs', 'r' .. random)
  settle(record[3])
end
return 'deleted'
