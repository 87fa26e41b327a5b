-- Remove files from a vector store, which may have been deleted. A file that has another block by now is left.
-- KEYS: store, index of the store's files
-- ARGV: 1 name of the store, then the name of each file and of its block ('' for none, '*' for any one of a damaged record)
-- Returns: {number of files that were left} and a report (lib.lua)

free(KEYS[1] .. ':none')
local left, removed = 0, {}
for i = 2, #ARGV, 2 do
  local file, key = ARGV[i], file_key(KEYS[1], ARGV[i])
  if ARGV[i + 1] == '*' then repair(key) end
  local before = redis.call('HMGET', key, 'status', 'batch', 'bytes', 'block')
  if ARGV[i + 1] ~= '*' and (before[4] or '') ~= ARGV[i + 1] then
    left = left + 1
  else
    if before[1] then
      count(KEYS[1], before[1], nil)
      if before[1] == 'in_progress' and before[2] ~= '' then count(batch_key(KEYS[1], before[2]), before[1], 'cancelled') end
      if redis.call('EXISTS', KEYS[1]) == 1 then redis.call('HINCRBY', KEYS[1], 'bytes', -(before[3] or 0)) end
    end
    redis.call('DEL', key)
    redis.call('ZREM', KEYS[2], file)
    redis.call('SREM', prefix .. 'of:' .. file, ARGV[1])
    removed[#removed + 1] = file
  end
end
if redis.call('EXISTS', KEYS[1]) == 1 then change(KEYS[1], removed) end
local reply = {left}
local _, add_file = store_report(reply)
for _, file in ipairs(removed) do add_file(KEYS[1], ARGV[1], file) end
return reply
