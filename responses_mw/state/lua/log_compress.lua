-- Store the compressed log of a background response that has ended, and shorten the lifetime of its plain log. Replicas of an
-- earlier release, and followers that have read a part of the plain log, use the plain log until it expires.
-- KEYS: record
-- ARGV: 1 lifetime of the plain log in ms, then the id and the compressed events of each entry
-- Returns: 1 the compressed log is stored; 0 the response has not ended at the last id or was deleted, or its log has expired

local record = redis.call('HMGET', KEYS[1], 'status', 'next_seq')
local random = string.match(KEYS[1], '[a-z0-9]+$')
local plain, compressed = prefix .. 'e:' .. random, prefix .. 'z:' .. random
local ttl = redis.call('PTTL', plain)
if not TERMINAL[record[1]] or record[2] ~= ARGV[#ARGV - 1] or ttl <= 0 then return 0 end
if redis.call('EXISTS', compressed) == 1 then return 1 end
for i = 2, #ARGV - 3, 2 do redis.call('XADD', compressed, ARGV[i] .. '-0', 'z', ARGV[i + 1]) end
redis.call('XADD', compressed, ARGV[#ARGV - 1] .. '-0', 'z', ARGV[#ARGV], 'final', 1)
redis.call('PEXPIRE', compressed, ttl)
redis.call('PEXPIRE', plain, math.min(ttl, ARGV[1]))
return 1
