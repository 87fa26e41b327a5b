-- Reads entries.
-- KEYS: generation
-- ARGV: ids
-- Answers {record, ms left} for each; {} for one that is not there

local found = {}
for i, id in ipairs(ARGV) do
  local record, left = read(id)
  found[i] = record and {record, left} or {}
end
return found
