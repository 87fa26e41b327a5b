-- Write the record of a new background response, the first events of its log, and its encrypted credential.
-- KEYS: record, tombstone
-- ARGV: 1 owner, 2 token of this call, 3 TTL in ms, 4 document, 5 job, 6 credential, 7 batch, 8 number of events in it,
--   9 whether the response is temporary ('1' or '')
-- Returns: {'created'} and a report (lib.lua); {'deleted'} (a worker claimed the job before its record was written, and gave it up)

local random = string.match(KEYS[1], '[a-z0-9]+$')

-- The log is reported separately while it grows and when it ends.
local function created()
  local reply = {'created'}
  local bytes = json_size(ARGV[4]) + json_size(ARGV[5]) + #ARGV[6] + #ARGV[7]
  report(reply)('r' .. random, KEYS[1], RECORD_BYTES + bytes)
  return reply
end

if redis.call('EXISTS', KEYS[2]) == 1 then return {'deleted'} end
if redis.call('HGET', KEYS[1], 'made') == ARGV[2] then return created() end
redis.call('HSET', KEYS[1], 'v', VERSION, 'owner', ARGV[1], 'made', ARGV[2], 'status', 'queued', 'token', '', 'lease_until', 0,
  'attempts', 0, 'looked', now_ms(), 'next_seq', 0, 'document', ARGV[4], 'job', ARGV[5])
if ARGV[9] == '1' then redis.call('HSET', KEYS[1], 'temporary', ARGV[3]) end
redis.call('PEXPIRE', KEYS[1], ARGV[3])
redis.call('SET', prefix .. 'k:' .. random, ARGV[6], 'PX', ARGV[3])
append_batch(KEYS[1], 0, ARGV[8] - 1, ARGV[7])
return created()
