-- A response's record and its turn, in one round trip.
-- KEYS: record
-- ARGV: owner
-- Answers: {v, document, turn}; nil if there is none for this owner

local record = redis.call('HMGET', KEYS[1], 'v', 'owner', 'document', 'segment', 'length')
if record[2] ~= ARGV[1] then return false end
local turn = record[4] and redis.call('LINDEX', prefix .. 's:' .. record[4], record[5] - 1)
return {record[1], record[3], turn or false}
