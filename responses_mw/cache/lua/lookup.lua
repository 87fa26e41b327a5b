-- Read an entry. If there is no entry, decide which request computes the answer, and return the new entries of the partition.
-- KEYS: generation
-- ARGV: 1 id, 2 token of a request that would compute the answer ('' for none), 3 ms for which the flight is leased to
--   that request; optional: 4 partition, 5 space, 6 the last number known to the caller, 7 limit
-- Returns {'hit', generation, record, remaining ms}; {'wait', generation}; {'lead' | 'alone', generation, result of 'since'}

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

local found = verdict()
return {found, generation(), found ~= 'wait' and ARGV[4] and since(ARGV[4], ARGV[5], ARGV[6], ARGV[7])}
