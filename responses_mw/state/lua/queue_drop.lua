-- Remove a job that has ended.
-- KEYS: ready
-- ARGV: job
-- Answers: its owner; nil if it was removed before

local owner = redis.call('HGET', prefix .. 'jobs', ARGV[1])
redis.call('ZREM', prefix .. 'since', ARGV[1])
redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('ZREM', prefix .. 'leases', ARGV[1])
redis.call('HDEL', prefix .. 'jobs', ARGV[1])
if owner then give_back_turn(KEYS[1], ARGV[1], owner) end
return owner
