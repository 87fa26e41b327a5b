-- Appends a batch of events to the log of a running background response, and renews its lease.
-- KEYS: record
-- ARGV: 1 token, 2 first and 3 last number, 4 batch, 5 lease in ms
-- Answers: 'appended'; 'fenced'; the number that the log goes on with, if that is not the first

local record = redis.call('HMGET', KEYS[1], 'token', 'status')
if record[1] ~= ARGV[1] or TERMINAL[record[2]] then return 'fenced' end
local random = string.match(KEYS[1], '[a-z0-9]+$')
local goes_on = append_batch(random, tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4])
if goes_on then return goes_on end
redis.call('HSET', KEYS[1], 'lease_until', now_ms() + ARGV[5])
return 'appended'
