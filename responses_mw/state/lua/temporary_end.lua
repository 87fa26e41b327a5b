-- End a temporary response: store its sealed document and turn in its record, and the last batch in its log.
-- KEYS: record, tombstone
-- ARGV: 1 token, 2 status, 3 document, 4 turn, 5 first and 6 last number of the batch, 7 batch
-- Returns: {'stored'} and a report (lib.lua); {'deleted'}; {'fenced'}; {'newer'}

local random = string.match(KEYS[1], '[a-z0-9]+$')
if redis.call('EXISTS', KEYS[2]) == 1 then return {'deleted'} end
local v, status, token, next_seq, temporary = unpack(redis.call('HMGET', KEYS[1], 'v', 'status', 'token', 'next_seq', 'temporary'))
if not v then return {'fenced'} end
if tonumber(v) > VERSION then return {'newer'} end
if token ~= ARGV[1] then return {'fenced'} end
if not TERMINAL[status] then
  if next_seq ~= ARGV[5] then return {'fenced'} end
  free(prefix .. 'k:' .. random)
  redis.call('HSET', KEYS[1], 'status', ARGV[2], 'document', ARGV[3], 'turn', ARGV[4])
  end_job(KEYS[1], tonumber(ARGV[5]), tonumber(ARGV[6]), ARGV[7])
  prolong(KEYS[1], temporary)
end
local reply = {'stored'}
local add = report(reply)
add('r' .. random, KEYS[1], RECORD_BYTES + #ARGV[3] + #ARGV[4])
add('e' .. random, prefix .. 'e:' .. random, redis.call('HGET', KEYS[1], 'logged') or 0)
return reply
