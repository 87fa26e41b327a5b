-- Return the number of waiting jobs, and for how long the oldest has waited.
-- KEYS: ready
-- ARGV: none
-- Answers: {number, ms}

local since = prefix .. 'since'
local waiting = redis.call('ZCARD', KEYS[1])
for _ = 1, 1000 do
  local oldest = redis.call('ZRANGE', since, 0, 0, 'WITHSCORES')
  if not oldest[1] then break end
  if redis.call('ZSCORE', KEYS[1], oldest[1]) then return {waiting, math.max(0, now_ms() - oldest[2])} end
  redis.call('ZREM', since, oldest[1])  -- an older release took it from the queue
end
return {waiting, 0}
