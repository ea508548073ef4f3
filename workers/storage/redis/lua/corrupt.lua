-- Fail a job whose record or run is not one of ours, with that as the reason, so that those who wait for it learn of
-- it. Its remains are put into quarantine: as `job` if the record can be read, else as `record`, and as `run`.
local CORRUPT_BECAUSE = 'what Redis has in place of the job is no record of this queue'
local CORRUPT = '\0' .. cmsgpack.pack({ 'CorruptRecord', CORRUPT_BECAUSE .. '; remove it, or retry is impossible', '' })

local function set_aside(id, name, priority, place, record, packed)
  local job, kept = read_job(record), ''
  if record or packed then
    kept = 'hash'
    redis.call('DEL', QUARANTINE .. ':' .. id)
    redis.call('HSET', QUARANTINE .. ':' .. id, job and 'job' or 'record', record or '', 'run', packed or '')
  end
  write_down(id, CORRUPT_BECAUSE, kept)
  local run = fresh_run(place)
  run.error = CORRUPT
  record = struct.pack('>BI8I8I4I4I8I8', PLAIN, place, place, priority % 2 ^ 31, 1, 0, HOUR)
    .. text(name) .. text('') .. text('') .. (record or '')
  redis.call('HSET', JOBS, id, record)
  conclude(id, record, {}, run, STATE.failed, HOUR)
  flush() -- it may stand in line a second time
end
