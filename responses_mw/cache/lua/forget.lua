-- Remove the entry made from a response.
-- KEYS: generation
-- ARGV: response id
-- Returns the number of removed entries

local id = redis.call('HGET', prefix .. 'r', ARGV[1])
if not id then return 0 end
drop(id)
return 1
