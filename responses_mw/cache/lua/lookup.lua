-- Read an entry, or the entry that an alias names. If there is none, decide which request computes the answer, and return the new
-- entries of the partition.
-- KEYS: generation
-- ARGV: 1 id, 2 token of a request that would compute the answer ('' for none), 3 ms for which the flight is leased to
--   that request, 4 judge whose aliases are followed ('' for none); optional: 5 partition, 6 space, 7 the last number known to the
--   caller, 8 limit
-- Returns {'hit', generation, record, remaining ms}, for an alias also the entry's id and the similarity; {'wait', generation};
--   {'lead' | 'alone', generation, result of 'since'}

local record, left = read(ARGV[1])
if record then return {'hit', generation(), record, left} end
if ARGV[4] ~= '' then
  local aliased, remaining, target, similarity = follow(ARGV[1], ARGV[4])
  if aliased then return {'hit', generation(), aliased, remaining, target, similarity} end
end

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
return {found, generation(), found ~= 'wait' and ARGV[5] and since(ARGV[5], ARGV[6], ARGV[7], ARGV[8])}
