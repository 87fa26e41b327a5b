-- Reserve an idempotency key for a request.
-- KEYS: key
-- ARGV: 1 hash of the request, 2 token of this reservation, 3 lease in ms
-- Returns: {'reserved'}; {'different'} (the key belongs to a different request); {'running' | 'done', id of the request's response or nil}

local request, token, response, done = unpack(redis.call('HMGET', KEYS[1], 'request', 'token', 'response', 'done'))
if not request then
  redis.call('HSET', KEYS[1], 'request', ARGV[1], 'token', ARGV[2])
  redis.call('PEXPIRE', KEYS[1], ARGV[3])
  return {'reserved'}
end
if request ~= ARGV[1] then return {'different'} end
if token == ARGV[2] then return {'reserved'} end
return {done and 'done' or 'running', response}
