-- Read the entries that were added to a partition.
-- KEYS: generation
-- ARGV: partition, space, the last number known to the caller, limit
-- Returns the generation and the result of 'since'

return {generation(), since(ARGV[1], ARGV[2], ARGV[3], ARGV[4])}
