-- Reads an entry by its whole key; where there is none, says who makes it.
-- KEYS: generation
-- ARGV: id; then, of one who would make it: token, ms for which nobody else does
-- Answers: {'hit', generation, record, ms left}; {'lead' | 'wait' | 'alone', generation}

local record, left = read(ARGV[1])
if record then return {'hit', generation(), record, left} end
if not ARGV[2] then return {'alone', generation()} end
local flight = prefix .. 'f:' .. ARGV[1]
local holder = redis.call('GET', flight)
if holder == '-' then return {'alone', generation()} end
if holder and holder ~= ARGV[2] then return {'wait', generation()} end
redis.call('SET', flight, ARGV[2], 'PX', ARGV[3])
return {'lead', generation()}
