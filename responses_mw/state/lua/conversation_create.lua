-- Create a conversation with its first items.
-- KEYS: conversation, tombstone of this call
-- ARGV: 1 owner, 2 created_at, 3 metadata, 4 TTL in ms, 5 maximum items, 6 maximum bytes, then id and blob of each item
-- Returns: {'created'} and a report (lib.lua); {'bound'}; {'missing'} (the id is another owner's, or the call was given
--   up and undone); {'newer'}

if redis.call('EXISTS', KEYS[2]) == 1 then return {'missing'} end
if redis.call('EXISTS', KEYS[1]) == 1 then
  local refused = refusal(ARGV[1])
  return refused and {refused} or with_size({'created'})
end
if not has_room(7, tonumber(ARGV[5]), tonumber(ARGV[6])) then return {'bound'} end
redis.call('HSET', KEYS[1], 'v', VERSION, 'owner', ARGV[1], 'created_at', ARGV[2], 'metadata', ARGV[3], 'last', 0, 'bytes', 0)
append_items(7, ARGV[4])
return with_size({'created'})
