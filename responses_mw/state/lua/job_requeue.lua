-- Take a background response from its worker, or end its wait for a retry, so that a worker can claim it now.
-- KEYS: record
-- Returns: {'missing'}, {'done'}, {'newer'}, {'cancelling'}; or {'requeued', owner, worker that has lost its lease or ''}
-- The empty token refuses all further writes of the worker. As the attempt did not fail, it is not counted. The time for retries
-- begins again.

local BEGUN = 3  -- created, queued and in_progress are not output

local names = {'v', 'status', 'owner', 'token', 'worker', 'lease_until', 'stopping', 'next_seq', 'temporary'}
local v, status, owner, token, worker, lease_until, stopping, next_seq, temporary = unpack(redis.call('HMGET', KEYS[1], unpack(names)))
if not v then return {'missing'} end
if tonumber(v) > VERSION then return {'newer'} end
if TERMINAL[status] then return {'done'} end
if stopping then return {'cancelling'} end

local now = now_ms()
local is_held = token ~= '' and tonumber(lease_until) > now
redis.call('HSET', KEYS[1], 'token', '', 'lease_until', now, 'looked', now)
redis.call('HDEL', KEYS[1], 'retries', 'retry_until', 'retry_seq')
if tonumber(next_seq) <= BEGUN then redis.call('HSET', KEYS[1], 'status', 'queued') end
if is_held then
  redis.call('HINCRBY', KEYS[1], 'attempts', -1)
  redis.call('HINCRBY', KEYS[1], 'total', -1)
end
prolong(KEYS[1], temporary)
return {'requeued', owner, is_held and worker or ''}
