-- Return the number of jobs that a worker could claim now, and the time that the oldest of them has waited.
-- KEYS: ready
-- ARGV: none
-- Returns: {number, ms}

local since, leases, now = prefix .. 'since', prefix .. 'leases', now_ms()

-- Return for how long (ms) the oldest job in `ready` has waited.
local function longest_wait()
  for _ = 1, 1000 do
    local oldest = redis.call('ZRANGE', since, 0, 0, 'WITHSCORES')
    if not oldest[1] then break end
    if redis.call('ZSCORE', KEYS[1], oldest[1]) then return now - oldest[2] end
    redis.call('ZREM', since, oldest[1])  -- `ready` was deleted, and the job was not added again
  end
  return 0
end

-- The oldest expired lease: the job's worker was lost, or the job is due for a retry.
local expired = redis.call('ZRANGEBYSCORE', leases, '-inf', now, 'WITHSCORES', 'LIMIT', 0, 1)[2] or now
return {redis.call('ZCARD', KEYS[1]) + redis.call('ZCOUNT', leases, '-inf', now), math.max(0, longest_wait(), now - expired)}
