-- Update the account of an owner's stored objects. Objects count until they expire. An older report never replaces a newer one.
-- KEYS: zset of the objects' names by their expiry (ms), hash that maps names to '<when> <bytes>' and contains the sum of bytes
-- ARGV: 1 maximum bytes (0: no limit), 2 time of the report (us; 0: a reservation), then name, bytes (0: deleted) and TTL in
--   ms of each object
-- Returns: {1 or 0 (nothing was changed, because the maximum would be exceeded), bytes stored}

local FORGOTTEN = 5000  -- expired objects removed per call
local LATE = 60000  -- ms

local expires, sizes = KEYS[1], KEYS[2]
local maximum, when, now = tonumber(ARGV[1]), tonumber(ARGV[2]), now_ms()

local function known(name)
  return string.match(redis.call('HGET', sizes, name) or '0 0', '^(%d+) (%d+)$')
end

if redis.call('EXISTS', expires) == 0 then redis.call('DEL', sizes) end  -- Redis may evict only one of the two
local sum = tonumber(redis.call('HGET', sizes, 'sum') or 0)
for _, name in ipairs(redis.call('ZRANGEBYSCORE', expires, '-inf', now, 'LIMIT', 0, FORGOTTEN)) do
  local _, bytes = known(name)
  sum = sum - bytes
  redis.call('HDEL', sizes, name)
  redis.call('ZREM', expires, name)
end
local before = sum

local changes = {}
for i = 3, #ARGV, 3 do
  local of, bytes = known(ARGV[i])
  if tonumber(of) <= when then
    sum = sum - bytes + ARGV[i + 1]
    changes[#changes + 1] = i
  end
end
local fits = maximum == 0 or sum <= before or sum <= maximum
if fits then
  for _, i in ipairs(changes) do
    local name, bytes, ttl = ARGV[i], ARGV[i + 1], tonumber(ARGV[i + 2])
    -- Keep the entry of a deleted object while an older report about the object may still arrive.
    if bytes == '0' and when > 0 then ttl = LATE end
    if ttl == 0 then
      redis.call('HDEL', sizes, name)
      redis.call('ZREM', expires, name)
    else
      redis.call('HSET', sizes, name, ARGV[2] .. ' ' .. bytes)
      redis.call('ZADD', expires, now + ttl, name)
      keep(expires, ttl)
    end
  end
else
  sum = before
end
if redis.call('EXISTS', expires) == 0 then
  redis.call('DEL', sizes)
else
  redis.call('HSET', sizes, 'sum', string.format('%d', sum))
  redis.call('PEXPIRE', sizes, redis.call('PTTL', expires))
end
return {fits and 1 or 0, sum}
