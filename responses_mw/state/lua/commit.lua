-- Store a finished response: its record and its turn, and its items in its conversation.
-- KEYS: record, tombstone
-- ARGV: 1 facts as JSON, 2 document, 3 turn; for a background response (facts.job) 4 the last batch of its log; then, by
--   facts.rest: 'turns' the turns of a new root, 'items' id and blob of each item
-- Returns: {'stored'}, followed by a report (lib.lua) if facts.counts; {'reroot'} (the caller must send the whole history as a new
--   root); {'deleted'}; {'fenced'}; {'newer'}; {'bound'}

local MAX_FORKS = 16

local new = cjson.decode(ARGV[1])
local REST = new.job and 5 or 4

local function earlier()
  if redis.call('EXISTS', KEYS[2]) == 1 then return 'deleted' end
  local old = redis.call('HMGET', KEYS[1], 'v', 'status', 'token')
  if not old[1] then return new.job and 'fenced' or nil end
  if tonumber(old[1]) > VERSION then return 'newer' end
  if old[3] ~= new.token then return 'fenced' end
  if TERMINAL[old[2]] then return 'stored' end
  if new.job and redis.call('HGET', KEYS[1], 'next_seq') ~= tostring(new.job.first) then return 'fenced' end
end

-- Start a new segment with the turns in ARGV.
local function root()
  local turns = prefix .. 's:' .. new.random
  if new.rest == 'turns' then
    for i = REST, #ARGV do redis.call('RPUSH', turns, ARGV[i]) end
  end
  return new.random, ''
end

-- Return the segment to append to, and its path. This is the parent's segment if the parent is its last turn and the new response can
-- be continued, otherwise a new segment that forks from it. Return nil if the parent or its turns no longer exist, or if the path has
-- too many forks. It is not enough to compare lengths, because the last turn may have been deleted and another one appended. So the
-- parent's record must be unchanged.
-- If the refs were evicted, it is unknown which turns are needed, so nothing is appended to the segment.
local function branch(parent)
  local record = redis.call('HMGET', prefix .. 'r:' .. parent.random, 'segment', 'length')
  if record[1] ~= parent.segment or record[2] ~= parent.length then return nil end
  local turns, length = prefix .. 's:' .. parent.segment, tonumber(parent.length)
  if not redis.call('ZSCORE', turns .. ':refs', 'r' .. parent.random) then return nil end
  if redis.call('LLEN', turns) > length then settle(parent.segment) end
  local held = redis.call('LLEN', turns)
  if held < length then return nil end
  if held == length and not new.aside then return parent.segment, parent.path end
  local _, forks = string.gsub(parent.path, ':', ':')
  if forks >= MAX_FORKS then return nil end
  redis.call('ZADD', turns .. ':refs', length, 's' .. new.random)
  redis.call('ZADD', prefix .. 's:' .. new.random .. ':refs', -1, 'p' .. parent.segment)
  return new.random, (parent.path == '' and '' or parent.path .. ',') .. parent.segment .. ':' .. parent.length
end

local function keep_segment(segment)
  keep(prefix .. 's:' .. segment, new.ttl)
  keep(prefix .. 's:' .. segment .. ':refs', new.ttl)
  if new.counts then keep(prefix .. 's:' .. segment .. ':bytes', new.ttl) end
end

-- Return the size of a segment in bytes, and cache it in a key next to the segment.
local function segment_size(segment)
  local turns = prefix .. 's:' .. segment
  local bytes = redis.call('GET', turns .. ':bytes')
  if not bytes then
    bytes = turns_size(turns, 0, -1)
    local ttl = redis.call('PTTL', turns)
    if ttl > 0 then redis.call('SET', turns .. ':bytes', bytes, 'PX', ttl) end
  end
  return SEGMENT_BYTES + bytes
end

-- Return the reply for a stored response, with a report of the objects that were written or whose TTL was extended.
local function stored()
  if not new.counts then return {'stored'} end
  local reply = {'stored'}
  local add, record = report(reply), redis.call('HMGET', KEYS[1], 'segment', 'path', 'logged')
  add('r' .. new.random, KEYS[1], RECORD_BYTES + json_size(ARGV[2]))
  add('s' .. record[1], prefix .. 's:' .. record[1], segment_size(record[1]))
  for ancestor in string.gmatch(record[2], '([a-z0-9]+):') do
    add('s' .. ancestor, prefix .. 's:' .. ancestor, segment_size(ancestor))
  end
  if new.job then add('e' .. new.random, prefix .. 'e:' .. new.random, record[3] or 0) end
  if new.rest == 'items' then add('c', prefix .. 'c', conversation_size()) end
  return reply
end

local answer = earlier()
if answer == 'stored' then return stored() end
if answer then return {answer} end
local appends = new.rest == 'items' and not new.aside and refusal(new.owner) == nil
if appends and not has_room(REST, new.max_items, new.max_bytes) then return {'bound'} end

if new.job then free(prefix .. 'k:' .. new.random) end
local segment, path
if new.parent then segment, path = branch(new.parent) else segment, path = root() end
if not segment then return {'reroot'} end

local turns = prefix .. 's:' .. segment
local length = redis.call('RPUSH', turns, ARGV[3])
if redis.call('EXISTS', turns .. ':bytes') == 1 then redis.call('INCRBY', turns .. ':bytes', turns_size(turns, -1, -1)) end
redis.call('ZADD', turns .. ':refs', length, 'r' .. new.random)
redis.call('HSET', KEYS[1], 'v', VERSION, 'owner', new.owner, 'status', new.status, 'token', new.token,
  'segment', segment, 'length', length, 'path', path, 'document', ARGV[2])
if new.seen then redis.call('HSET', KEYS[1], 'seen', new.seen) end
redis.call('PEXPIRE', KEYS[1], new.ttl)
keep_segment(segment)
for ancestor in string.gmatch(path, '([a-z0-9]+):') do
  -- Remove the turns of expired responses, so that this commit does not extend their lifetime.
  if redis.call('EXISTS', prefix .. 's:' .. ancestor .. ':refs') == 1 then settle(ancestor) end
  keep_segment(ancestor)
end
if appends then append_items(REST, new.ttl) end
if new.job then
  end_job(KEYS[1], new.job.first, new.job.last, ARGV[4])
  redis.call('PEXPIRE', prefix .. 'e:' .. new.random, new.job.log_ttl)
end
return stored()
