-- Store an answer, which replaces the previous one. If a limit is exceeded, evict the oldest entries of the partition, or the entries
-- of the shard that expire first.
-- KEYS: generation
-- ARGV: 1 facts as JSON, 2 record, 3 vector ('' for none)
-- Returns 'kept', 'purged' (the cache was purged since the lookup) or 'bound' (the entry alone exceeds a limit)

local MAX_EVICTED = 100  -- per call and reason
local new = cjson.decode(ARGV[1])
local size = #ARGV[2] + #ARGV[3]
if generation() ~= new.generation then return 'purged' end
if size > new.partition_bytes or size > new.shard_bytes then return 'bound' end

local members = prefix .. 'p:' .. new.partition
local now = now_ms()

local function add()
  redis.call('ZADD', members, next_number(), new.id)
  redis.call('SET', prefix .. 'b:' .. new.id, generation() .. ':' .. ARGV[2], 'PX', new.ttl)
  redis.call('ZADD', prefix .. 'i', now + new.ttl, new.id)
  redis.call('HSET', prefix .. 'e', new.id, table.concat({size, new.partition, new.response, new.space}, '|'))
  redis.call('HSET', prefix .. 'r', new.response, new.id)
  count('all', size)
  count(new.partition, size)
  if new.space ~= '' then
    redis.call('HSET', prefix .. 'v:' .. new.partition .. ':' .. new.space, new.id, now + new.ttl .. ':' .. ARGV[3])
  end
end

local function over(zset, entries, field, bytes)
  return redis.call('ZCARD', zset) > entries or tonumber(redis.call('HGET', prefix .. 't', field) or 0) > bytes
end

local function shrink(zset, entries, field, bytes)
  local evicted = 0
  while evicted < MAX_EVICTED and over(zset, entries, field, bytes) do
    local id = redis.call('ZRANGE', zset, 0, 0)[1]
    if not id then return end
    drop(id)
    redis.call('ZREM', zset, id)  -- in case Redis evicted the entry's facts
    evicted = evicted + 1
  end
end

for _, id in ipairs(redis.call('ZRANGE', prefix .. 'i', '-inf', now, 'BYSCORE', 'LIMIT', 0, MAX_EVICTED)) do drop(id) end
drop(new.id)
-- Redis may have evicted a list of entries, but not the sum of their bytes.
if redis.call('EXISTS', members) == 0 then redis.call('HDEL', prefix .. 't', new.partition) end
if redis.call('EXISTS', prefix .. 'i') == 0 then redis.call('HDEL', prefix .. 't', 'all') end
add()
shrink(members, new.partition_entries, new.partition, new.partition_bytes)
shrink(prefix .. 'i', new.shard_entries, 'all', new.shard_bytes)
for _, name in ipairs({'i', 'e', 't', 'r', 'n', 'p:' .. new.partition, 'v:' .. new.partition .. ':' .. new.space}) do
  redis.call('PEXPIRE', prefix .. name, new.index_ttl, 'NX')
  redis.call('PEXPIRE', prefix .. name, new.index_ttl, 'GT')
end
redis.call('PEXPIRE', KEYS[1], new.index_ttl, 'GT')  -- without its generation, the entry would no longer be found
local flight = prefix .. 'f:' .. new.id
if redis.call('GET', flight) == new.token then redis.call('DEL', flight) end
return 'kept'
