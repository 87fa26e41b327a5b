-- Run every command of the other scripts once, on keys in one slot.
-- KEYS: a key whose name is unknown to other scripts
-- Returns: for each command that the server refuses, the kind of its permission, its name and the error

local key, refused = KEYS[1], {}

-- Call each command, and record the refused ones. `kind` names the ACL category or the command that permits them.
local function try(kind, commands)
  for _, command in ipairs(commands) do
    local reply = redis.pcall(unpack(command))
    if type(reply) == 'table' and reply.err then refused[#refused + 1] = {kind, command[1], reply.err} end
  end
end

local string_, hash, list, set, zset, stream = key .. ':t', key .. ':h', key .. ':l', key .. ':s', key .. ':z', key .. ':x'
try('@write', {
  {'SET', string_, 0}, {'INCR', string_}, {'INCRBY', string_, 1}, {'DECRBY', string_, 1},
  {'HSET', hash, 'a', 1}, {'HSETNX', hash, 'b', 1}, {'HINCRBY', hash, 'a', 1}, {'HDEL', hash, 'b'},
  {'RPUSH', list, 1}, {'LTRIM', list, 0, 0}, {'SADD', set, 1, 2}, {'SREM', set, 2},
  {'ZADD', zset, 1, 'a', 2, 'b', 3, 'c'}, {'ZREM', zset, 'a'}, {'ZREMRANGEBYSCORE', zset, 3, 3}, {'XADD', stream, '1-0', 'a', 1},
})
try('@read', {
  {'EXISTS', string_}, {'TYPE', string_}, {'PTTL', string_}, {'GET', string_},
  {'HGET', hash, 'a'}, {'HMGET', hash, 'a'}, {'HGETALL', hash}, {'HEXISTS', hash, 'a'}, {'HLEN', hash}, {'HSTRLEN', hash, 'a'},
  {'HKEYS', hash}, {'HSCAN', hash, 0},
  {'LLEN', list}, {'LINDEX', list, 0}, {'LRANGE', list, 0, 0}, {'SMEMBERS', set}, {'XRANGE', stream, '-', '+', 'COUNT', 1},
  {'ZCARD', zset}, {'ZCOUNT', zset, 0, 1}, {'ZSCORE', zset, 'b'}, {'ZRANGE', zset, 0, 0}, {'ZREVRANGE', zset, 0, 0},
  {'ZRANGEBYSCORE', zset, 0, 1}, {'ZREVRANGEBYSCORE', zset, 1, 0}, {'ZRANK', zset, 'b'}, {'ZREVRANK', zset, 'b'},
})
local keys = {string_, hash, list, set, zset, stream}
for _, name in ipairs(keys) do try('@write', {{'PEXPIRE', name, 60000}, {'EXPIRE', name, 60}}) end  -- in case DEL is refused
try('@write', {{'DEL', unpack(keys)}, {'UNLINK', unpack(keys)}})
try('time', {{'TIME'}})
try('@pubsub', {{'SPUBLISH', key .. ':ev', ''}})
return refused
