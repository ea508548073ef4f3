-- The queue's keys. KEYS[1] is its hash-tagged base, ARGV[1] the database's number.
local BASE = KEYS[1]
local JOBS, RUNS, META = BASE .. ':jobs', BASE .. ':runs', BASE .. ':meta'
local READY, HELD, BUSY = BASE .. ':ready', BASE .. ':held', BASE .. ':busy'
local SCHEDULED, FAILING, LEASES = BASE .. ':scheduled', BASE .. ':failing', BASE .. ':leases'
local COMPLETED, FAILED, CANCELLED = BASE .. ':completed', BASE .. ':failed', BASE .. ':cancelled'
local WORKERS, SLEEPERS = BASE .. ':workers', BASE .. ':sleepers'
local WAITING, AFTER, DEPENDENTS = BASE .. ':waiting', BASE .. ':after', BASE .. ':dependents'
local GATES, PASSING, FILLING, OPENING = BASE .. ':gates', BASE .. ':passing', BASE .. ':filling', BASE .. ':opening'
local QUEUE_KEY = '\30Q'
local CRONS, CRONS_DUE = BASE .. ':crons', BASE .. ':crons_due'
local MARKS, THROTTLED, QUARANTINE = BASE .. ':marks', BASE .. ':throttled', BASE .. ':quarantine'

-- The types that the keys must have: the first are hashes, the marks last among them. THROTTLED, QUARANTINE
-- and CRONS are checked by the scripts that use them, WAITING and AFTER where there are DEPENDENTS, PASSING, FILLING and OPENING
-- where there are GATES.
local HASHES = 7
local KEPT = {
  JOBS, RUNS, META, BUSY, SLEEPERS, GATES, MARKS,
  READY, HELD, SCHEDULED, FAILING, LEASES, COMPLETED, FAILED, CANCELLED, WORKERS, DEPENDENTS,
}
local function kind_of(at)
  return at > HASHES and 'zset' or 'hash'
end

local function damaged(why)
  return redis.error_reply('DAMAGED ' .. why)
end

-- Times are microseconds of the server's clock.
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
local at_ms = math.floor(now / 1000)
