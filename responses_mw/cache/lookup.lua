-- Reads an entry by its whole key; where there is none, says who makes it, and what was kept in its partition since.
-- KEYS: generation
-- ARGV: 1 id, 2 token of one who would make it ('' for none), 3 ms for which nobody else does;
--   then, of one who holds the partition's vectors: 4 partition, 5 space, 6 the last number that is known, 7 at most so many
-- Answers: {'hit', generation, record, ms left}; {'lead' | 'wait' | 'alone', generation, what 'since' tells}

local record, left = read(ARGV[1])
if record then return {'hit', generation(), record, left} end

local function verdict()
  if ARGV[2] == '' then return 'alone' end
  local flight = prefix .. 'f:' .. ARGV[1]
  local holder = redis.call('GET', flight)
  if holder == '-' then return 'alone' end
  if holder and holder ~= ARGV[2] then return 'wait' end
  redis.call('SET', flight, ARGV[2], 'PX', ARGV[3])
  return 'lead'
end

return {verdict(), generation(), ARGV[4] and since(ARGV[4], ARGV[5], ARGV[6], ARGV[7])}
