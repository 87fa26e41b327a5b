-- Publish to a channel.
-- KEYS: channel
-- ARGV: message

return redis.call('SPUBLISH', KEYS[1], ARGV[1])
