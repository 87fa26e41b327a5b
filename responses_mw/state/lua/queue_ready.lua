-- Add a job to the queue, in its owner's turn or at the front.
-- KEYS: ready
-- ARGV: job, whether to add it at the front ('1' or '')

local owner = redis.call('HGET', prefix .. 'jobs', ARGV[1])
if not owner or redis.call('ZSCORE', KEYS[1], ARGV[1]) then return end
redis.call('ZREM', prefix .. 'since', ARGV[1])  -- first: a full Redis lets the script continue after this
wait_for_worker(KEYS[1], ARGV[1], owner, ARGV[2] ~= '')
redis.call('ZREM', prefix .. 'leases', ARGV[1])  -- last: if a key is damaged, the job becomes available again when the lease expires
