-- Hand a background response back, as if it had not been taken.
-- KEYS: record
-- ARGV: token
-- Answers: 'released'; 'fenced'

local record = redis.call('HMGET', KEYS[1], 'token', 'status')
if record[1] ~= ARGV[1] or TERMINAL[record[2]] then return 'fenced' end
redis.call('HSET', KEYS[1], 'token', '', 'lease_until', 0)
redis.call('HINCRBY', KEYS[1], 'attempts', -1)
return 'released'
