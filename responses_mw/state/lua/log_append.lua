-- Append batches of events to the logs of running background responses, one batch to each log, and renew the leases.
-- KEYS: records; in a cluster, only one
-- ARGV: 1 lease in ms, then for each record token, first and last number, batch
-- Returns for each record: 1 the log contains the batch; 0 another worker holds the response, the response has ended, or the batch
--   does not continue its log; 2 the record or log is damaged

-- Return whether an error from pcall() was caused by a damaged key, not by the state of the server.
local function is_damage(err)
  local text = type(err) == 'table' and err.err or tostring(err)
  for _, sign in ipairs({'WRONGTYPE', 'user_script:', 'not an integer', 'specified in XADD'}) do
    if string.find(text, sign, 1, true) then return true end
  end
  return false
end

local until_then, answers = now_ms() + ARGV[1], {}

local function append(record, token, first, last, batch)
  local found = redis.call('HMGET', record, 'token', 'status', 'temporary')
  if found[1] ~= token or TERMINAL[found[2]] then return 0 end
  if append_batch(record, tonumber(first), tonumber(last), batch) then return 0 end
  redis.call('HSET', record, 'lease_until', until_then)
  prolong(record, found[3])
  return 1
end

for i, record in ipairs(KEYS) do
  local at = 4 * i - 2
  local ok, answer = pcall(append, record, ARGV[at], ARGV[at + 1], ARGV[at + 2], ARGV[at + 3])
  if not ok and not is_damage(answer) then return error(answer, 0) end
  answers[i] = ok and answer or 2
end
return answers
