-- Removes the entry that was made of a response, and tells those who hold copies.
-- KEYS: generation
-- ARGV: response, ms for which that is told
-- Answers how many there were

local id = redis.call('HGET', prefix .. 'r', ARGV[1])
if not id then return 0 end
drop(id)
next_number('x')
redis.call('PEXPIRE', prefix .. 'x', ARGV[2])
return 1
