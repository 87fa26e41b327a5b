-- Goes on with a flight, or ends it; nothing happens to that of another.
-- KEYS: generation
-- ARGV: id, token, what ('renew', 'release', or 'mark' as not to be kept), ms

local flight = prefix .. 'f:' .. ARGV[1]
if redis.call('GET', flight) ~= ARGV[2] then return 0 end
if ARGV[3] == 'renew' then return redis.call('PEXPIRE', flight, ARGV[4]) end
if ARGV[3] == 'release' then return redis.call('DEL', flight) end
redis.call('SET', flight, '-', 'PX', ARGV[4])
return 1
