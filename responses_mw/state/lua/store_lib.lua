-- Functions of the scripts for vector stores, after those of lib.lua. All keys are in the slot of the owner.

local STORE_FILE_BYTES = 1024  -- overhead of a file in a store, in bytes
local BATCH_BYTES, BATCH_FILE_BYTES = 512, 128  -- overhead of a batch and of each of its files, in bytes
local FOREVER = 10 * 365 * 24 * 3600 * 1000  -- TTL in ms in the owner's account

local function file_key(store, file) return store .. ':f:' .. file end
local function batch_key(store, batch) return store .. ':b:' .. batch end

-- Return the fields of a record and their values. A key of another type has one field that no record has.
local function read_fields(key)
  local fields = redis.pcall('HGETALL', key)
  return fields.err and {'damaged', fields.err} or fields
end

-- Remove what is damaged in the record of a file, so that the file can be ingested again.
local NUMBERS, BLOCK_FIELDS = {'pieces', 'chunks', 'bytes'}, {'block', 'pieces', 'chunks', 'bytes'}
local function repair(key)
  if redis.call('TYPE', key).ok ~= 'hash' then return redis.call('DEL', key) end
  if not string.match(redis.call('HGET', key, 'created_at') or '', '^%d+$') then redis.call('HDEL', key, 'created_at') end
  local is_sound = string.match(redis.call('HGET', key, 'block') or '', '^[a-z0-9]*$')
  for _, value in ipairs(redis.call('HMGET', key, unpack(NUMBERS))) do
    is_sound = is_sound and string.match(value or '0', '^%d+$')
  end
  if not is_sound then redis.call('HDEL', key, unpack(BLOCK_FIELDS)) end
end

-- Return the sum of the lengths of fields.
local function length_of(key, ...)
  local bytes = 0
  for _, field in ipairs({...}) do bytes = bytes + redis.call('HSTRLEN', key, field) end
  return bytes
end

-- Begin a report for the owner's account (lib.lua) in a script's reply, and return the functions that add a store, a file and a batch.
local function store_report(reply)
  local time = redis.call('TIME')
  reply[#reply + 1] = time[1] * 1000000 + time[2]
  local function add(name, bytes, ttl)
    for _, value in ipairs({name, bytes, ttl}) do reply[#reply + 1] = value end
  end
  local function add_store(store, name)
    if redis.call('EXISTS', store) == 0 then return add('v' .. name, 0, 0) end
    add('v' .. name, RECORD_BYTES + length_of(store, 'name', 'description', 'metadata'), FOREVER)
  end
  local function add_file(store, name, file)
    local key = file_key(store, file)
    if redis.call('EXISTS', key) == 0 then return add('v' .. name .. file, 0, 0) end
    local bytes = STORE_FILE_BYTES + length_of(key, 'filename', 'attributes', 'message')
    add('v' .. name .. file, bytes + (tonumber(redis.call('HGET', key, 'bytes') or '') or 0), FOREVER)
  end
  local function add_batch(store, name, batch, ttl)
    local files = redis.call('ZCARD', batch_key(store, batch) .. ':files')
    add('v' .. name .. 'b' .. batch, BATCH_BYTES + BATCH_FILE_BYTES * files, ttl)
  end
  return add_store, add_file, add_batch
end

-- Change the counts of a holder of files (a store or a batch). `from` and `to` are statuses, or nil. Without the holder, do nothing.
local STATUSES = {in_progress = true, completed = true, failed = true, cancelled = true}
local function count(holder, from, to)
  if not STATUSES[from] then from = nil end  -- the record of a file is damaged
  if from == to or redis.call('EXISTS', holder) == 0 then return end
  if from then redis.call('HINCRBY', holder, from, -1) end
  if to then redis.call('HINCRBY', holder, to, 1) end
end

-- Set the status of a file in a store, and count it there and in its batch.
local function set_status(store, file, status)
  local key = file_key(store, file)
  local before = redis.call('HMGET', key, 'status', 'batch')
  redis.call('HSET', key, 'status', status)
  count(store, before[1], status)
  if before[2] and before[2] ~= '' then count(batch_key(store, before[2]), before[1], status) end
end

-- Record that files of the store have changed: every process reads them again before its next search. Of removed files, only the
-- last ones are listed. A process that knows an older version than `forgotten` reads all files.
local MAX_CHANGES = 20000
local function change(store, files)
  local version, changes = redis.call('HINCRBY', store, 'version', 1), store .. ':changes'
  for _, file in ipairs(files) do redis.call('ZADD', changes, version, file) end
  local excess = redis.call('ZCARD', changes) - MAX_CHANGES
  if excess > 0 then
    local last = redis.call('ZRANGE', changes, excess - 1, excess - 1, 'WITHSCORES')[2]
    redis.call('ZREMRANGEBYSCORE', changes, '-inf', last)
    redis.call('HSET', store, 'forgotten', last)
  end
end

-- Return the time in Unix seconds when a store expires, or nil if it does not.
local DAY = 24 * 3600
local function expiry(store)
  local fields = redis.call('HMGET', store, 'days', 'active')
  return fields[1] and fields[2] + fields[1] * DAY
end

-- Return 'missing', 'newer' or 'expired' if the files of the store must not be changed, or nil.
local function store_refusal(store)
  local fields = redis.call('HMGET', store, 'v', 'expired')
  if not fields[1] then return 'missing' end
  if tonumber(fields[1]) > VERSION then return 'newer' end
  local at = expiry(store)
  if fields[2] or (at and at * 1000 <= now_ms()) then return 'expired' end
end
