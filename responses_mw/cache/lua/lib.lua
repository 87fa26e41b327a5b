-- Functions shared by the scripts of the cache, prepended to each script.
-- All keys of a script belong to one shard of one owner, and are in one cluster slot. KEYS[1] is the shard's generation; the other keys
-- share its prefix:
--   g                 generation: entries of another generation are treated as deleted
--   b:<id>            body of an entry: generation, colon, record
--   a:<id>            alias: generation|judge|similarity|id of the entry whose question the judge found to be the same
--   j:<id>            hash of an entry's verdicts: judge:id of the other phrasing -> 'y', 'n', or when a claim to judge it ends (ms)
--   f:<id>            flight: token of the request that computes the answer, or '-' if the answer is known not to be cacheable
--   i                 zset: ids by expiry (ms)
--   e                 hash: id -> 'size|partition|response|space'
--   t                 hash: bytes in total ('all') and by partition
--   r                 hash: response id -> entry id
--   n                 number of the newest entry
--   p:<part>          zset: ids of a partition by their number
--   v:<part>:<space>  hash: id -> expiry, colon, vector
-- Every script can safely be repeated.

local prefix = string.match(KEYS[1], '^rmw:{c:[a-z0-9]+:%d+}:')

local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function generation()
  return redis.call('GET', KEYS[1]) or '0'
end

-- Return the record of an entry and its remaining ms, or nil if this generation has no such entry.
local function read(id)
  local body = redis.call('GET', prefix .. 'b:' .. id)
  if not body then return nil end
  local head = generation() .. ':'
  if string.sub(body, 1, #head) ~= head then return nil end
  return string.sub(body, #head + 1), redis.call('PTTL', prefix .. 'b:' .. id)
end

-- Return the record of the entry that an alias of this judge names, its remaining ms, its id, and the similarity; or nil.
local function follow(id, judge)
  local alias = redis.call('GET', prefix .. 'a:' .. id)
  if not alias then return nil end
  local made, by, similarity, target = string.match(alias, '^([^|]*)|([^|]*)|([^|]*)|(.*)$')
  if made ~= generation() or by ~= judge then return nil end
  local record, left = read(target)
  return record, left, target, similarity
end

-- Return the number of a new entry. Numbers start at the current time in ms, so that none is used twice even if 'n' was lost.
local function next_number()
  redis.call('SET', prefix .. 'n', now_ms(), 'NX')
  return redis.call('INCR', prefix .. 'n')
end

local function count(field, bytes)
  if redis.call('HINCRBY', prefix .. 't', field, bytes) <= 0 then redis.call('HDEL', prefix .. 't', field) end
end

-- Return the number of the newest entry, and up to 'limit' entries of a partition with a number above 'after'.
-- Each entry is an id, a number, and an expiry with a vector, or '' if the entry has no vector.
local function since(partition, space, after, limit)
  local found = redis.call('ZRANGE', prefix .. 'p:' .. partition, '(' .. after, '+inf', 'BYSCORE', 'LIMIT', 0, limit, 'WITHSCORES')
  local answer = {redis.call('GET', prefix .. 'n') or '0'}
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

-- Remove the verdicts on an entry and the aliases that name it.
local function drop_verdicts(id)
  local verdicts = prefix .. 'j:' .. id
  local found = redis.call('HGETALL', verdicts)
  for i = 1, #found, 2 do
    local alias = prefix .. 'a:' .. string.match(found[i], '[^:]*$')
    if found[i + 1] == 'y' and string.match(redis.call('GET', alias) or '', '[^|]*$') == id then redis.call('UNLINK', alias) end
  end
  if #found > 0 then redis.call('UNLINK', verdicts) end
end

-- Remove an entry and everything that refers to it. The entry's body may have expired already, and Redis may have evicted 'e'.
local function drop(id)
  drop_verdicts(id)
  redis.call('ZREM', prefix .. 'i', id)
  local facts = redis.call('HGET', prefix .. 'e', id)
  if not facts then return end
  local size, partition, response, space = string.match(facts, '^(%d+)|([^|]*)|([^|]*)|([^|]*)')
  redis.call('UNLINK', prefix .. 'b:' .. id)
  redis.call('ZREM', prefix .. 'p:' .. partition, id)
  redis.call('HDEL', prefix .. 'e', id)
  redis.call('HDEL', prefix .. 'r', response)
  if space ~= '' then redis.call('HDEL', prefix .. 'v:' .. partition .. ':' .. space, id) end
  count('all', -size)
  count(partition, -size)
end
