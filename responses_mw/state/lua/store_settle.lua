-- End the ingestion of a file: its chunks become visible, or it has failed.
-- KEYS: store
-- ARGV: 1 name of the store, 2 name of the file, 3 generation, 4 status, 5 vector space and 6 dimension of the vectors ('' for a
--   failure), then fields of the file and their values, beginning with the block
-- Returns: {'settled', block that is not needed any more or ''} and a report (lib.lua); {'fenced'} (the result is not wanted any
--   more); {'space', vector space of the store, its dimension}

local key = file_key(KEYS[1], ARGV[2])
local before = redis.call('HMGET', key, 'status', 'generation', 'block', 'bytes')
if store_refusal(KEYS[1]) or before[2] ~= ARGV[3] then return {'fenced'} end
local reply = {'settled', ''}
local _, add_file = store_report(reply)
if before[1] ~= 'in_progress' then  -- this call was repeated
  if before[1] ~= ARGV[4] then return {'fenced'} end
  if ARGV[7] == 'block' and before[3] ~= ARGV[8] then reply[2] = ARGV[8] end
  add_file(KEYS[1], ARGV[1], ARGV[2])
  return reply
end
if ARGV[5] ~= '' then
  local space = redis.call('HMGET', KEYS[1], 'space', 'dimension')
  if not space[1] then
    redis.call('HSET', KEYS[1], 'space', ARGV[5], 'dimension', ARGV[6])
  elseif space[1] ~= ARGV[5] or space[2] ~= ARGV[6] then
    return {'space', space[1], space[2]}
  end
end
set_status(KEYS[1], ARGV[2], ARGV[4])
redis.call('HSET', key, unpack(ARGV, 7))
if ARGV[4] == 'completed' then
  redis.call('HINCRBY', KEYS[1], 'bytes', redis.call('HGET', key, 'bytes') - (before[4] or 0))
  if before[3] and before[3] ~= ARGV[8] then reply[2] = before[3] end
end
change(KEYS[1], {ARGV[2]})
add_file(KEYS[1], ARGV[1], ARGV[2])
return reply
