-- Remove a job that has ended.
-- KEYS: ready
-- ARGV: job
-- Returns: the job's owner; nil if the job was removed before

-- Give the turn of a cancelled job to the owner's next job, that job's turn to the job after it, and so on.
local MAX_MOVED = 1000  -- jobs; if an owner has more, a gap remains after these jobs
local function give_back_turn(ready, job, owner)
  local turns = prefix .. 'turns:' .. owner
  local free = redis.call('ZSCORE', turns, job)
  if redis.call('ZREM', turns, job) == 0 then return end
  local later = redis.call('ZRANGEBYSCORE', turns, '(' .. free, '+inf', 'WITHSCORES', 'LIMIT', 0, MAX_MOVED)
  for i = 1, #later, 2 do
    redis.call('ZADD', ready, 'XX', free, later[i])  -- if a key was damaged, the job may have been claimed already
    redis.call('ZADD', turns, free, later[i])
    free = later[i + 1]
  end
  local last = redis.call('ZRANGE', turns, -1, -1, 'WITHSCORES')[2]
  if last then redis.call('ZADD', prefix .. 'owners', last, owner) else redis.call('ZREM', prefix .. 'owners', owner) end
end

local owner = redis.call('HGET', prefix .. 'jobs', ARGV[1])
-- Read every key first, so that nothing is removed if one is damaged. The worker that claims the job next then removes it.
for _, key in ipairs({KEYS[1], prefix .. 'since', prefix .. 'leases', prefix .. 'turns:' .. (owner or ''), prefix .. 'owners'}) do
  redis.call('ZSCORE', key, ARGV[1])
end
redis.call('ZREM', prefix .. 'since', ARGV[1])
redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('ZREM', prefix .. 'leases', ARGV[1])
redis.call('HDEL', prefix .. 'jobs', ARGV[1])
if owner then give_back_turn(KEYS[1], ARGV[1], owner) end
return owner
