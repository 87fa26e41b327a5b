-- Claim, record or withdraw the judge's verdict on the pair of an entry and another phrasing of its question.
-- KEYS: generation
-- ARGV: 1 action; 2 id of the entry; 3 id of the other phrasing; 4 judge; 5 (claim) lease in ms, or (settle) 'y' or 'n';
--   6 (settle) generation; 7 (settle) similarity
-- 'claim' returns 'y' or 'n' if the pair was judged, 'busy' if it is being judged, 'full' if the entry has too many verdicts,
--   'gone' if there is no entry, or 'claimed'.
-- 'settle' records the verdict and returns 'settled', or returns 'gone'.
-- 'reject' removes the entry and its aliases, and returns the number of removed entries.

local MAX_VERDICTS = 200  -- of an entry
local BYTES = 160  -- of a verdict and its alias, counted as part of the entry

local target = ARGV[2]
local verdicts = prefix .. 'j:' .. target
local pair = ARGV[4] .. ':' .. ARGV[3]

if ARGV[1] == 'reject' then
  local existed = redis.call('HEXISTS', prefix .. 'e', target)
  drop(target)
  return existed
end

local record, left = read(target)
local facts = redis.call('HGET', prefix .. 'e', target)
if not record or not facts then return 'gone' end

if ARGV[1] == 'claim' then
  local known = redis.call('HGET', verdicts, pair)
  if known == 'y' or known == 'n' then return known end
  if known and tonumber(known) > now_ms() then return 'busy' end
  if not known and redis.call('HLEN', verdicts) >= MAX_VERDICTS then return 'full' end
  if not known then
    local size, rest = string.match(facts, '^(%d+)|(.*)')
    redis.call('HSET', prefix .. 'e', target, string.format('%d|%s', size + BYTES, rest))
    count('all', BYTES)
    count(string.match(rest, '^[^|]*'), BYTES)
  end
  redis.call('HSET', verdicts, pair, string.format('%d', now_ms() + ARGV[5]))
  redis.call('PEXPIRE', verdicts, left)
  return 'claimed'
end

if generation() ~= ARGV[6] then return 'gone' end
redis.call('HSET', verdicts, pair, ARGV[5])
redis.call('PEXPIRE', verdicts, left)
if ARGV[5] == 'y' then
  redis.call('SET', prefix .. 'a:' .. ARGV[3], table.concat({generation(), ARGV[4], ARGV[7], target}, '|'), 'PX', left)
end
return 'settled'
