-- Remove a job that has ended.
-- KEYS: ready
-- ARGV: job
-- Answers: its owner; nil if it was removed before

-- Give the turn of a cancelled job to the owner's next job, the turn of that job to the one after it, and so on.
local MAX_MOVED = 1000  -- jobs; an owner who has more keeps the gap
local function give_back_turn(ready, job, owner)
  local turns = prefix .. 'turns:' .. owner
  local free = redis.call('ZSCORE', turns, job)
  if redis.call('ZREM', turns, job) == 0 then return end
  local later = redis.call('ZRANGEBYSCORE', turns, '(' .. free, '+inf', 'WITHSCORES', 'LIMIT', 0, MAX_MOVED)
  for i = 1, #later, 2 do
    if redis.call('ZSCORE', ready, later[i]) then
      redis.call('ZADD', ready, free, later[i])
      redis.call('ZADD', turns, free, later[i])
      free = later[i + 1]
    else
      redis.call('ZREM', turns, later[i])  -- an older release took it from the queue
    end
  end
  local last = redis.call('ZRANGE', turns, -1, -1, 'WITHSCORES')[2]
  if last then redis.call('ZADD', prefix .. 'owners', last, owner) else redis.call('ZREM', prefix .. 'owners', owner) end
end

local owner = redis.call('HGET', prefix .. 'jobs', ARGV[1])
-- Read every key first: if one is damaged, nothing is removed, and the worker that claims the job next removes it.
for _, key in ipairs({KEYS[1], prefix .. 'since', prefix .. 'leases', prefix .. 'turns:' .. (owner or ''), prefix .. 'owners'}) do
  redis.call('ZSCORE', key, ARGV[1])
end
redis.call('ZREM', prefix .. 'since', ARGV[1])
redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('ZREM', prefix .. 'leases', ARGV[1])
redis.call('HDEL', prefix .. 'jobs', ARGV[1])
if owner then give_back_turn(KEYS[1], ARGV[1], owner) end
return owner
