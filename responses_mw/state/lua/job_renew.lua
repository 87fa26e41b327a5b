-- Renew the lease of a running background response.
-- KEYS: record
-- ARGV: 1 token, 2 lease in ms
-- Returns: 'renewed'; 'fenced'

local record = redis.call('HMGET', KEYS[1], 'token', 'status', 'temporary')
if record[1] ~= ARGV[1] or TERMINAL[record[2]] then return 'fenced' end
redis.call('HSET', KEYS[1], 'lease_until', now_ms() + ARGV[2])
prolong(KEYS[1], record[3])
return 'renewed'
