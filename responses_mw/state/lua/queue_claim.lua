-- Lease one job: a job whose lease has expired, otherwise the next waiting job.
-- KEYS: ready
-- ARGV: 1 lease in ms, 2 whether to lease jobs with an expired lease ('1' or ''), 3 whether to lease waiting jobs ('1' or '')
-- Returns: the job; nil if no job is available

local leases, now = prefix .. 'leases', now_ms()
local job = ARGV[2] == '1' and redis.call('ZRANGEBYSCORE', leases, '-inf', now, 'LIMIT', 0, 1)[1]
local turn
if not job and ARGV[3] == '1' then
  job, turn = unpack(redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES'))
end
if not job then return false end
redis.call('ZREM', prefix .. 'since', job)  -- first: a full Redis lets the script continue after this
redis.call('ZADD', leases, now + ARGV[1], job)  -- second: if another key is damaged, the job becomes available again when the lease expires
if turn then
  redis.call('ZREM', KEYS[1], job)
  turn = math.max(tonumber(turn), tonumber(redis.call('GET', prefix .. 'clock') or 0))
  redis.call('SET', prefix .. 'clock', turn)
  redis.call('ZREMRANGEBYSCORE', prefix .. 'owners', '-inf', turn)  -- such entries have no effect any more
  local owner = redis.call('HGET', prefix .. 'jobs', job)
  if owner then redis.call('ZREM', prefix .. 'turns:' .. owner, job) end
end
return job
