-- Lease a background response to a new holder, who must run or end it. The holder's token replaces the previous one.
-- KEYS: record, tombstone
-- ARGV: 1 token, 2 worker, 3 lease in ms, 4 maximum attempts, 5 why: 'run', 'settle' (end it if it is lost) or 'cancel',
--   6 owner ('' for any), 7 TTL of the tombstone in ms
-- Returns: {'missing'}, {'done'}, {'newer'}, {'held', ms until the lease expires}, {'waiting', owner if its place in the queue has
--   not been checked recently, otherwise ''}; or
--   {'run' | 'lost' | 'failed' | 'cancelled', next number, document, job, owner, credential, lost worker, retries, last error
--   as JSON, ms left for retries, earlier attempts, continuations}
-- An attempt that adds output to the log makes the earlier attempts irrelevant. Only their total is limited as well, because the
-- output may be reasoning that each worker begins anew.

local BEGUN = 3  -- created, queued and in_progress are not output
local TOTAL = 20  -- maximum attempts in total
local ABANDONED = 600000  -- ms without a worker after which a response with output is lost
local CANCELLING = 10000  -- ms that another request to cancel the response has before this one takes over
local credential_key = prefix .. 'k:' .. string.match(KEYS[1], '[a-z0-9]+$')

local names = {'v', 'status', 'owner', 'lease_until', 'next_seq', 'attempts', 'stopping', 'worker', 'looked', 'token'}
local v, status, owner, lease_until, next_seq, attempts, stopping, worker, looked, token = unpack(redis.call('HMGET', KEYS[1], unpack(names)))
if not v then
  -- The job was deleted, or its creator failed after adding it to the queue. From now on, its record must not be created.
  if ARGV[5] == 'run' then redis.call('SET', KEYS[2], ARGV[1], 'NX', 'PX', ARGV[7]) end
  free(credential_key)  -- in case only the record was lost
  return {'missing'}
end
if ARGV[6] ~= '' and ARGV[6] ~= owner then return {'missing'} end
if tonumber(v) > VERSION then return {'newer'} end
if TERMINAL[status] then return {'done'} end

local retries, failure, retry_until, retry_seq, erred, total, begun_seq = unpack(redis.call('HMGET', KEYS[1], 'retries', 'error', 'retry_until', 'retry_seq', 'erred', 'total', 'begun_seq'))
local has_grown = begun_seq and tonumber(next_seq) > math.max(tonumber(begun_seq), BEGUN)
if has_grown then attempts = 0 end
if retry_seq ~= next_seq then retries, retry_until = false, false end  -- the job has made progress since
local now = now_ms()
local left = tonumber(lease_until) - now
if left > 0 and (ARGV[5] ~= 'cancel' or stopping and left > ARGV[3] - CANCELLING) then return {'held', left} end

local verdict = 'run'
if ARGV[5] == 'cancel' or stopping then
  verdict = 'cancelled'
elseif retry_until and now >= tonumber(retry_until) then
  verdict = 'failed'
elseif tonumber(attempts) >= tonumber(ARGV[4]) or tonumber(total or 0) >= TOTAL then
  verdict = failure and erred and 'failed' or 'lost'  -- depends on how the last attempt ended
elseif ARGV[5] == 'settle' and tonumber(next_seq) > BEGUN and -left > ABANDONED then
  verdict = 'lost'
elseif ARGV[5] == 'settle' then
  if now - (looked or 0) <= QUEUE_TRUSTED then return {'waiting', ''} end
  redis.call('HSET', KEYS[1], 'looked', now)
  return {'waiting', owner}
end
if token == '' then worker = '' end  -- it has released the job

local credential = redis.call('TYPE', credential_key).ok == 'string' and redis.call('GET', credential_key)
if verdict ~= 'run' then free(credential_key) end
redis.call('HSET', KEYS[1], 'token', ARGV[1], 'worker', ARGV[2], 'lease_until', now + ARGV[3])
if verdict == 'run' then
  redis.call('HSET', KEYS[1], 'status', 'in_progress')
  redis.call('HSET', KEYS[1], 'attempts', attempts + 1, 'begun_seq', next_seq)
  redis.call('HINCRBY', KEYS[1], 'total', 1)
  redis.call('HDEL', KEYS[1], 'erred')
end
if verdict == 'cancelled' then redis.call('HSET', KEYS[1], 'stopping', 1) end
local texts = redis.call('HMGET', KEYS[1], 'document', 'job', 'continuations', 'temporary')
prolong(KEYS[1], texts[4])
return {verdict, tonumber(next_seq) or 'damaged', texts[1], texts[2], owner, credential, worker, retries, failure, (retry_until or now) - now, tonumber(attempts), tonumber(texts[3] or 0)}
