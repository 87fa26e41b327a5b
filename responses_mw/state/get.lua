-- A response's record and its turn, in one round trip.
-- KEYS: record
-- ARGV: owner
-- Answers: {v, status, document, turn, job, whether its lease is over}; nil if there is none for this owner

local record = redis.call('HMGET', KEYS[1], 'v', 'owner', 'status', 'document', 'segment', 'length', 'job', 'lease_until')
if record[2] ~= ARGV[1] then return false end
local turn = record[5] and redis.call('LINDEX', prefix .. 's:' .. record[5], record[6] - 1)
local over = record[3] == 'in_progress' and tonumber(record[8] or 0) <= now_ms()
return {record[1], record[3], record[4], turn or false, record[7], over and 1 or 0}
