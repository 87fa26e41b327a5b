-- What the scripts of the cache share; it stands before each of them.
-- The keys of a script all lie in one slot, that of a shard of an owner. KEYS[1] is the shard's generation; the others have its prefix:
--   g            the generation: what was kept under another one is not there any more
--   b:<id>       an entry's body: generation, colon, record
--   f:<id>       who makes the answer just now (a token), or '-' where it turned out that it cannot be kept
--   i            zset: ids by the time (ms) at which they expire
--   e            hash: of each id 'size|partition|response|space|form'
--   t            hash: bytes of all ('all'), and of each partition
--   r            hash: ids by the response that they were made of
--   n            the number of the last entry: begins at the time in ms, and so never comes again
--   x            a number that grows, as that one, when an entry is removed because its response was deleted
--   p:<part>     zset: ids of a partition by their number
--   v:<part>:<space>  hash: of each id its expiry and its vector, to be scanned
-- and rmw:v2:<space>:{slot}:<id>, a hash that an index knows: partition, head and vector
-- Every script can be repeated.

local prefix = string.match(KEYS[1], '^rmw:{c:[a-z0-9]+:%d+}:')
local slot = string.match(prefix, '{.*}')

local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function generation()
  return redis.call('GET', KEYS[1]) or '0'
end

-- The record of an entry, and how many ms it is still there; nil where there is none of this generation.
local function read(id)
  local body = redis.call('GET', prefix .. 'b:' .. id)
  if not body then return nil end
  local head = generation() .. ':'
  if string.sub(body, 1, #head) ~= head then return nil end
  return string.sub(body, #head + 1), redis.call('PTTL', prefix .. 'b:' .. id)
end

-- Counts up, from the time in ms on: a number that was given once never comes again.
local function next_number(name)
  redis.call('SET', prefix .. name, now_ms(), 'NX')
  return redis.call('INCR', prefix .. name)
end

local function vector_key(space, id)
  return 'rmw:v2:' .. space .. ':' .. slot .. ':' .. id
end

local function count(field, bytes)
  if redis.call('HINCRBY', prefix .. 't', field, bytes) <= 0 then redis.call('HDEL', prefix .. 't', field) end
end

-- What was kept in a partition after entry number 'after', at most so many: the last number that was given away, the first that is
-- still there, the number of removals, then for each id, number, expiry and vector ('' for an entry without).
local function since(partition, space, after, most)
  local members = prefix .. 'p:' .. partition
  local found = redis.call('ZRANGE', members, '(' .. after, '+inf', 'BYSCORE', 'LIMIT', 0, most, 'WITHSCORES')
  local first = redis.call('ZRANGE', members, 0, 0, 'WITHSCORES')[2] or '0'
  local answer = {redis.call('GET', prefix .. 'n') or '0', first, redis.call('GET', prefix .. 'x') or '0'}
  local ids = {}
  for i = 1, #found, 2 do ids[#ids + 1] = found[i] end
  if #ids == 0 then return answer end
  local vectors = redis.call('HMGET', prefix .. 'v:' .. partition .. ':' .. space, unpack(ids))
  for i, id in ipairs(ids) do
    answer[#answer + 1] = id
    answer[#answer + 1] = found[2 * i]
    answer[#answer + 1] = vectors[i] or ''
  end
  return answer
end

-- Removes an entry with all that points to it. It may be gone already, by its expiry, but for that.
local function drop(id)
  local facts = redis.call('HGET', prefix .. 'e', id)
  if not facts then return end
  local size, partition, response, space, form = string.match(facts, '^(%d+)|([^|]*)|([^|]*)|([^|]*)|([^|]*)$')
  redis.call('UNLINK', prefix .. 'b:' .. id)
  redis.call('ZREM', prefix .. 'i', id)
  redis.call('ZREM', prefix .. 'p:' .. partition, id)
  redis.call('HDEL', prefix .. 'e', id)
  redis.call('HDEL', prefix .. 'r', response)
  if form == 'scan' then redis.call('HDEL', prefix .. 'v:' .. partition .. ':' .. space, id) end
  if form == 'index' then redis.call('UNLINK', vector_key(space, id)) end
  count('all', -size)
  count(partition, -size)
end
