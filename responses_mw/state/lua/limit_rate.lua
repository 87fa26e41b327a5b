-- Count a request from an owner if its rate allows it: GCRA with a burst of the requests of one minute.
-- KEYS: rate
-- ARGV: requests in a minute
-- Returns: {1 or 0, requests allowed now, ms until the whole burst is allowed, ms until the next request is allowed}

local burst = tonumber(ARGV[1])
local interval, now = 60000 / burst, now_ms()
local tat = math.max(tonumber(redis.call('GET', KEYS[1]) or 0), now)  -- theoretical arrival time
if tat > now + 61000 then tat = now end  -- a failed primary with a clock that was ahead has set it
local left = math.floor((60000 - (tat - now)) / interval + 1e-6)
if left < 1 then return {0, 0, math.ceil(tat - now), math.ceil(tat - now + interval - 60000)} end
tat = tat + interval
redis.call('SET', KEYS[1], string.format('%.6f', tat), 'PX', math.ceil(tat - now))
return {1, left - 1, math.ceil(tat - now), 0}
