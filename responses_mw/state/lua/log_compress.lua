-- Replace the entries of the log of a background response that has ended with compressed ones. The id of an entry is still the
-- number of its last event + 1, so a reader can continue from any event.
-- KEYS: record
-- ARGV: the number of the last event + 1 and the compressed events of each entry
-- Returns: 1 the log is compressed; 0 the response has not ended at the last id or was deleted or is temporary, or its log has expired

local record = redis.call('HMGET', KEYS[1], 'status', 'next_seq', 'temporary')
local log = prefix .. 'e:' .. string.match(KEYS[1], '[a-z0-9]+$')
local ttl = redis.call('PTTL', log)
if record[3] or not TERMINAL[record[1]] or record[2] ~= ARGV[#ARGV - 1] or ttl <= 0 then return 0 end
free(log)
for i = 1, #ARGV - 3, 2 do redis.call('XADD', log, ARGV[i] .. '-0', 'z', ARGV[i + 1]) end
redis.call('XADD', log, ARGV[#ARGV - 1] .. '-0', 'z', ARGV[#ARGV], 'final', 1)
redis.call('PEXPIRE', log, ttl)
return 1
