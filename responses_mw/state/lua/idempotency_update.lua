-- Renew, complete or release the reservation of an idempotency key.
-- KEYS: key
-- ARGV: 1 token of the reservation, 2 TTL in ms (0: release it), 3 id of the response or '', 4 '1' once the response exists
-- Returns: 1 the reservation was changed; 0 the key no longer belongs to this reservation

if redis.call('HGET', KEYS[1], 'token') ~= ARGV[1] then return 0 end
if ARGV[2] == '0' then return redis.call('DEL', KEYS[1]) end
if ARGV[3] ~= '' then redis.call('HSET', KEYS[1], 'response', ARGV[3]) end
if ARGV[4] == '1' then redis.call('HSET', KEYS[1], 'done', 1) end
keep(KEYS[1], ARGV[2])  -- a late renewal must not shorten the time that a completed key is kept
return 1
