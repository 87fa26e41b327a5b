-- Shared functions, prepended to every script.
-- The keys of a script are all in one slot. Keys that the script derives (segments, refs) have the prefix of KEYS[1].
-- Every script can safely be repeated. The scripts that `Writer` retries (writes.py) are idempotent: a repeated call changes nothing
-- and returns the same verdict.

local VERSION = 1
local QUEUE_TRUSTED = 10000  -- ms that a waiting job is assumed to be in the queue, before it is checked
local prefix = string.match(KEYS[1], '^rmw:{[a-z0-9]+}:')

local TERMINAL = {completed = true, incomplete = true, failed = true, cancelled = true}

local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- Free memory with the script's first write. A full Redis then also executes the script's other writes. Only scripts that end or
-- delete an object may call this, because they write little and what they write expires.
local function free(key)
  redis.call('DEL', key)
end

-- Extend a TTL, but never shorten it. GT alone would have no effect on a key without a TTL.
local function keep(key, ttl)
  if redis.call('PEXPIRE', key, ttl, 'NX') == 0 then
    redis.call('PEXPIRE', key, ttl, 'GT')
  end
end

-- Return the highest number of turns that an existing holder needs. If there is no holder, return nil and the parent segment.
-- Holders are responses ('r<random>') and child segments ('s<segment>'). Up to 1,000 holders that no longer exist are removed; if
-- there are more, the next one counts as existing until a later call. The parent ('p<segment>', with score -1) needs no turns.
local MAX_REMOVED = 1000
local function highest(refs)
  for removed = 0, MAX_REMOVED do
    local top = redis.call('ZREVRANGE', refs, 0, 0, 'WITHSCORES')
    if not top[1] then return nil end
    local kind, name = string.sub(top[1], 1, 1), string.sub(top[1], 2)
    if kind == 'p' then return nil, name end
    if removed == MAX_REMOVED or redis.call('EXISTS', prefix .. kind .. ':' .. name) == 1 then return tonumber(top[2]) end
    redis.call('ZREM', refs, top[1])
  end
end

-- Return the size of the JSON in a stored blob.
local function json_size(blob)
  return tonumber(string.match(blob, '^Z(%d+):')) or #blob - 1
end

-- Overhead of objects in Redis besides their JSON, in bytes.
local RECORD_BYTES, SEGMENT_BYTES, ITEM_BYTES, TOMBSTONE_BYTES = 1536, 768, 256, 256

-- Begin a report for the owner's account (account.lua) in a script's reply, and return the function that adds an object to it.
-- A report has the time (us), then the name, bytes and TTL in ms of each object. Names are 'r<random>' (record), 's<segment>',
-- 'e<random>' (event log) and 'c' (conversation). The number of bytes is 0 for a deleted object.
local function report(reply)
  local time = redis.call('TIME')
  reply[#reply + 1] = time[1] * 1000000 + time[2]
  return function(name, key, bytes)
    local ttl = redis.call('PTTL', key)
    if ttl <= 0 then bytes, ttl = 0, 0 end
    for _, value in ipairs({name, bytes, ttl}) do reply[#reply + 1] = value end
  end
end

-- Return the size of turns before compression.
local function turns_size(turns, first, last)
  local bytes = 0
  for _, turn in ipairs(redis.call('LRANGE', turns, first, last)) do
    bytes = bytes + (tonumber(string.match(turn, '^[a-z0-9]+Z(%d+):')) or #turn)
  end
  return bytes
end

-- Segments from which this script has removed turns.
local settled = {}

-- Remove the turns of a segment from index `from` on.
local function cut(turns, from)
  if redis.call('EXISTS', turns .. ':bytes') == 1 then
    redis.call('DECRBY', turns .. ':bytes', turns_size(turns, from, -1))
  end
  redis.call('LTRIM', turns, 0, from - 1)
end

-- Remove the turns of a segment that no holder needs. If no turns are left, delete the segment and settle its parent.
local function settle(segment)
  while segment do
    local turns = prefix .. 's:' .. segment
    local refs = turns .. ':refs'
    local needed, parent = highest(refs)
    settled[#settled + 1] = segment
    if needed then
      if redis.call('LLEN', turns) > needed then cut(turns, needed) end
      return
    end
    redis.call('DEL', turns, refs, turns .. ':bytes')
    if parent then redis.call('ZREM', prefix .. 's:' .. parent .. ':refs', 's' .. segment) end
    segment = parent
  end
end

-- Return whether the conversation has room for the items (id, blob, id, blob, ...) in ARGV from `first` on. Items that the
-- conversation already contains are not counted twice.
local function has_room(first, max_items, max_bytes)
  local bytes, count = tonumber(redis.call('HGET', prefix .. 'c', 'bytes') or 0), redis.call('ZCARD', prefix .. 'c:order')
  for i = first, #ARGV, 2 do
    if redis.call('HEXISTS', prefix .. 'c:items', ARGV[i]) == 0 then
      bytes, count = bytes + json_size(ARGV[i + 1]), count + 1
    end
  end
  return count <= max_items and bytes <= max_bytes
end

-- Append the items (id, blob, id, blob, ...) in ARGV from `first` on as one block. An item that the conversation already contains
-- keeps its place.
local function append_items(first, ttl)
  local meta, items, order = prefix .. 'c', prefix .. 'c:items', prefix .. 'c:order'
  for i = first, #ARGV, 2 do
    if redis.call('HSETNX', items, ARGV[i], ARGV[i + 1]) == 1 then
      redis.call('ZADD', order, redis.call('HINCRBY', meta, 'last', 1), ARGV[i])
      redis.call('HINCRBY', meta, 'bytes', json_size(ARGV[i + 1]))
    end
  end
  for _, key in ipairs({meta, items, order}) do keep(key, ttl) end
end

-- Remove an item from the conversation. Return whether the conversation contained it.
local function remove_item(id)
  local blob = redis.call('HGET', prefix .. 'c:items', id)
  if not blob then return false end
  redis.call('HDEL', prefix .. 'c:items', id)
  redis.call('ZREM', prefix .. 'c:order', id)
  redis.call('HINCRBY', prefix .. 'c', 'bytes', -json_size(blob))
  return true
end

-- Return the size of the conversation in bytes, including overhead.
local function conversation_size()
  local key = prefix .. 'c'
  local items, bytes = redis.call('ZCARD', key .. ':order'), redis.call('HGET', key, 'bytes') or 0
  return RECORD_BYTES + redis.call('HSTRLEN', key, 'metadata') + ITEM_BYTES * items + bytes
end

-- Add a report of the conversation's size to a script's reply, and return the reply.
local function with_size(reply)
  report(reply)('c', prefix .. 'c', conversation_size())
  return reply
end

-- Return whether the conversation is complete. Redis may evict its keys one by one, which would leave a different history.
local function is_whole()
  local count = redis.call('ZCARD', prefix .. 'c:order')
  local is_empty = tonumber(redis.call('HGET', prefix .. 'c', 'bytes') or 0) == 0
  return count == redis.call('HLEN', prefix .. 'c:items') and is_empty == (count == 0)
end

-- Return 'missing' or 'newer' if the script must not use the conversation. Return nil if the conversation is complete (or if
-- `a_part_is_enough`), belongs to this owner and has a supported version.
local function refusal(owner, a_part_is_enough)
  local meta = redis.call('HMGET', prefix .. 'c', 'v', 'owner')
  if meta[2] ~= owner then return 'missing' end
  if tonumber(meta[1]) > VERSION then return 'newer' end
  if not a_part_is_enough and not is_whole() then return 'missing' end
end

-- Append a batch of events, numbered `first` to `last`, to the log of the response in `record`. `final` marks the last batch of a log.
-- Return nil if the log contains the batch now, otherwise the number of the log's next event. Repeating the last batch changes nothing.
-- An entry's id is the number of its last event + 1, because 0-0 is not a valid id.
-- A short batch is published as `last`, ' final' if it ends the log, a line feed and the batch. For a longer batch, the message is empty.
local ANNOUNCED = 16384
local function append_batch(record, first, last, batch, final)
  local slot, random = string.match(record, '^(rmw:{[a-z0-9]+}:)r:([a-z0-9]+)$')
  local log, id = slot .. 'e:' .. random, string.format('%d-0', last + 1)
  local next_seq = tonumber(redis.call('HGET', record, 'next_seq'))
  if next_seq == last + 1 then
    local entry = redis.call('XRANGE', log, id, id)[1]
    if entry and entry[2][2] == batch then return nil end
  end
  if next_seq ~= first then return next_seq end
  if final then redis.call('XADD', log, id, 'b', batch, 'final', 1) else redis.call('XADD', log, id, 'b', batch) end
  if redis.call('PTTL', log) == -1 then redis.call('PEXPIRE', log, redis.call('PTTL', record)) end  -- it is new
  redis.call('HSET', record, 'next_seq', last + 1)
  redis.call('HINCRBY', record, 'logged', #batch)
  local head = last .. (final and ' final' or '') .. '\n'
  redis.call('SPUBLISH', slot .. 'ev:' .. random, #batch <= ANNOUNCED and head .. batch or '')
end

-- Complete the log of the background response in `record` with its last batch, and remove the fields of its job.
local function end_job(record, first, last, batch)
  local log = prefix .. 'e:' .. string.match(record, '[a-z0-9]+$')
  local kind = redis.call('TYPE', log).ok
  if kind ~= 'stream' then redis.call('DEL', log) end  -- a damaged log must not prevent its response from ending
  append_batch(record, first, last, batch, true)
  redis.call('HDEL', record, 'job', 'lease_until', 'worker', 'attempts', 'total', 'begun_seq', 'stopping', 'retries', 'error', 'retry_until', 'retry_seq', 'erred')
end

-- Let the keys of a temporary response expire in `temporary` ms from now. Do nothing if `temporary` is false.
local function prolong(record, temporary)
  if not temporary then return end
  local slot, random = string.match(record, '^(rmw:{[a-z0-9]+}:)r:([a-z0-9]+)$')
  for _, key in ipairs({record, slot .. 'e:' .. random, slot .. 'k:' .. random}) do redis.call('PEXPIRE', key, temporary) end
end

-- Add a job to the queue `ready`, in its owner's turn or (if `first`) at the front, and notify the workers.
local TURNS_KEPT = 7 * 24 * 3600 * 1000  -- ms; without stored turns, cancelled jobs would delay their owner's next jobs
local function wait_for_worker(ready, job, owner, first)
  local turn = tonumber(redis.call('GET', prefix .. 'clock') or 0)
  if not first then
    turn = math.max(turn, tonumber(redis.call('ZSCORE', prefix .. 'owners', owner) or 0)) + 1
    redis.call('ZADD', prefix .. 'owners', turn, owner)
    redis.call('ZADD', prefix .. 'turns:' .. owner, turn, job)
    redis.call('PEXPIRE', prefix .. 'turns:' .. owner, TURNS_KEPT)
  end
  redis.call('ZADD', ready, turn, job)
  redis.call('ZADD', prefix .. 'since', 'NX', now_ms(), job)
  redis.call('SPUBLISH', prefix .. 'ev', '')
end
