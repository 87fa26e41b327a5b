-- Return jobs of the queue of an older release, and let its keys expire.
-- KEYS: ready
-- ARGV: maximum number of jobs, TTL of the keys in ms
-- Returns: '1', then the waiting jobs in their order, each with its owner; or if there are none, '', then the leased jobs. If the
--   owner is unknown, it is ''.

local jobs = prefix .. 'jobs'
for _, name in ipairs({'ready', 'leases', 'jobs', 'since', 'owners', 'clock'}) do redis.call('PEXPIRE', prefix .. name, ARGV[2], 'NX') end
for _, key in ipairs({KEYS[1], prefix .. 'leases'}) do
  local found = {key == KEYS[1] and '1' or ''}
  for _, job in ipairs(redis.call('ZRANGE', key, 0, ARGV[1] - 1)) do
    local owner = redis.call('HGET', jobs, job) or ''
    redis.call('PEXPIRE', prefix .. 'turns:' .. owner, ARGV[2], 'NX')
    for _, value in ipairs({job, owner}) do found[#found + 1] = value end
  end
  if #found > 1 then return found end
end
return {''}
