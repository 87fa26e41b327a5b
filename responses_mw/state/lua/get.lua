-- Return a response's record and turn.
-- KEYS: record
-- ARGV: owner
-- Returns: {v, status, document, turn, job, whether to settle the job}; nil if the owner has no such response

local names = {'v', 'owner', 'status', 'document', 'segment', 'length', 'job', 'lease_until', 'looked', 'turn'}
local record = redis.call('HMGET', KEYS[1], unpack(names))
if record[2] ~= ARGV[1] then return false end
local turn = record[5] and redis.call('LINDEX', prefix .. 's:' .. record[5], record[6] - 1) or record[10]
local now = now_ms()
-- Settle the job if no worker holds it: its worker was lost, or the job has waited so long that its place in the queue may be lost.
local nobodys = tonumber(record[8] or 0) <= now
local settle = nobodys and (record[3] == 'in_progress' or record[3] == 'queued' and now - (record[9] or 0) > QUEUE_TRUSTED)
return {record[1], record[3], record[4], turn or false, record[7], settle and 1 or 0}
