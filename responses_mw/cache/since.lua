-- The vectors of a partition that were kept since.
-- KEYS: generation
-- ARGV: partition, space, the last number that is known, at most so many
-- Answers: generation, and what 'since' tells

return {generation(), since(ARGV[1], ARGV[2], ARGV[3], ARGV[4])}
