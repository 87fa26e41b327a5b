-- The vectors of a partition that were kept since.
-- KEYS: generation
-- ARGV: partition, space, the last number that is known, at most so many
-- Answers: generation, last number given away, first number that is still there, then for each: id, number, expiry and vector ('' for an entry without)

local members = prefix .. 'p:' .. ARGV[1]
local found = redis.call('ZRANGE', members, '(' .. ARGV[3], '+inf', 'BYSCORE', 'LIMIT', 0, ARGV[4], 'WITHSCORES')
local first = redis.call('ZRANGE', members, 0, 0, 'WITHSCORES')[2] or '0'
local answer = {generation(), redis.call('GET', prefix .. 'n') or '0', first}
local ids = {}
for i = 1, #found, 2 do ids[#ids + 1] = found[i] end
if #ids == 0 then return answer end
local vectors = redis.call('HMGET', prefix .. 'v:' .. ARGV[1] .. ':' .. ARGV[2], unpack(ids))
for i, id in ipairs(ids) do
  answer[#answer + 1] = id
  answer[#answer + 1] = found[2 * i]
  answer[#answer + 1] = vectors[i] or ''
end
return answer
