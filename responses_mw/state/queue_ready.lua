-- Has a job wait for a worker: after the owner's last one, and before what others, who have more waiting, enter later; or (first) before all.
-- KEYS: ready
-- ARGV: job, whether it comes first ('1' or '')

local owner = redis.call('HGET', prefix .. 'jobs', ARGV[1])
if not owner or redis.call('ZSCORE', KEYS[1], ARGV[1]) then return end
redis.call('ZREM', prefix .. 'leases', ARGV[1])
local turn = tonumber(redis.call('GET', prefix .. 'clock') or 0)
if ARGV[2] == '' then
  turn = math.max(turn, tonumber(redis.call('ZSCORE', prefix .. 'owners', owner) or 0)) + 1
  redis.call('ZADD', prefix .. 'owners', turn, owner)
end
redis.call('ZADD', KEYS[1], turn, ARGV[1])
redis.call('SPUBLISH', prefix .. 'ev', '')
