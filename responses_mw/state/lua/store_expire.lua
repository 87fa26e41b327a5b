-- Mark a vector store as expired if it is.
-- KEYS: store
-- Returns: 'missing', 'expired', or the time of its expiry in Unix seconds (0: it does not expire)

local fields = redis.call('HMGET', KEYS[1], 'v', 'expired')
if not fields[1] then return 'missing' end
if fields[2] then return 'expired' end
local at = expiry(KEYS[1])
if not at then return 0 end
if at * 1000 > now_ms() then return at end
free(KEYS[1] .. ':none')
redis.call('HSET', KEYS[1], 'expired', 1)
change(KEYS[1], {})
return 'expired'
