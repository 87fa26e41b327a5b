-- Renew the leases of jobs that are still leased.
-- KEYS: ready
-- ARGV: lease in ms, jobs

local until_then = now_ms() + ARGV[1]
for i = 2, #ARGV do redis.call('ZADD', prefix .. 'leases', 'XX', until_then, ARGV[i]) end
