-- Renew or end a flight; do nothing if another request holds it.
-- KEYS: generation
-- ARGV: id, token, action ('renew', 'release', or 'mark' an answer that no request should wait for), lease or lifetime of the mark in ms
-- Returns whether the request held the flight

local flight = prefix .. 'f:' .. ARGV[1]
if redis.call('GET', flight) ~= ARGV[2] then return 0 end
if ARGV[3] == 'renew' then return redis.call('PEXPIRE', flight, ARGV[4]) end
if ARGV[3] == 'release' then return redis.call('DEL', flight) end
redis.call('SET', flight, '-', 'PX', ARGV[4])
return 1
