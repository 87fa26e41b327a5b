-- Remove the entry made from a response, and increment the removal counter so that replicas drop their copies.
-- KEYS: generation
-- ARGV: response id, lifetime of the removal counter in ms
-- Returns the number of removed entries

local id = redis.call('HGET', prefix .. 'r', ARGV[1])
if not id then return 0 end
drop(id)
next_number('x')
redis.call('PEXPIRE', prefix .. 'x', ARGV[2])
return 1
