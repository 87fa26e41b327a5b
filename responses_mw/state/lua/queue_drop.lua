-- Remove a job that has ended.
-- KEYS: ready
-- ARGV: job
-- Answers: its owner; nil if it was removed before

local owner = redis.call('HGET', prefix .. 'jobs', ARGV[1])
-- Read every key first: if one is damaged, nothing is removed, and the worker that claims the job next removes it.
for _, key in ipairs({KEYS[1], prefix .. 'since', prefix .. 'leases', prefix .. 'turns:' .. (owner or ''), prefix .. 'owners'}) do
  redis.call('ZSCORE', key, ARGV[1])
end
redis.call('ZREM', prefix .. 'since', ARGV[1])
redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('ZREM', prefix .. 'leases', ARGV[1])
redis.call('HDEL', prefix .. 'jobs', ARGV[1])
if owner then give_back_turn(KEYS[1], ARGV[1], owner) end
return owner
