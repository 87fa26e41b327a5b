-- Removes the entry that was made of a response.
-- KEYS: generation
-- ARGV: response
-- Answers how many there were

local id = redis.call('HGET', prefix .. 'r', ARGV[1])
if not id then return 0 end
drop(id)
return 1
