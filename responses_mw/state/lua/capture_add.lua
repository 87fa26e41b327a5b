-- Write a capture, unless its response was deleted. A later capture of the same response replaces it.
-- KEYS: capture, tombstone of the response
-- ARGV: 1 capture, 2 TTL in ms
-- Returns: 1; 0 if the response was deleted

if redis.call('EXISTS', KEYS[2]) == 1 then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
