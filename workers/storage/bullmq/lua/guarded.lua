-- ARGV[1]: prefix of the queue's keys, [2]: now in ms, [3]: how many claims follow, 0 in front of a recovery, -1 to
-- set aside keys in the way as well.
local P, at_ms, claims = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local QUARANTINE = P .. 'workers:quarantine'
