-- Read entries.
-- KEYS: generation
-- ARGV: ids
-- Returns {record, remaining ms} for each id, or {} if the entry no longer exists

local found = {}
for i, id in ipairs(ARGV) do
  local record, left = read(id)
  found[i] = record and {record, left} or {}
end
return found
