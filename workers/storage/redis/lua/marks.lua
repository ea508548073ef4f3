-- Deduplication keys of jobs that are enqueued. This is a file of its own, because each function costs every run of a
-- script. Gives the waiting job the payload of the new one, which is its last `size` bytes, and lets it wait as long.
local function debounce(id, record, known, new, size)
  local job, run = known.job, known.run
  local _, start = struct.unpack('>I2c0', record, job.finish)
  local place, rest = next_place() + new[5], new[7]
  local payload = string.sub(rest, #rest - size + 1)
  if known.state == STATE.waiting then
    place = job.created + new[5]
    redis.call('HSET', JOBS, id, write_job(string.byte(record), place, job.created, string.sub(record, struct.size('>BI8I8') + 1, start - 1) .. payload))
    return STATE.waiting
  end
  step_out(job, run.place, id)
  redis.call('HSET', JOBS, id, write_job(string.byte(record), place, job.created, string.sub(record, struct.size('>BI8I8') + 1, start - 1) .. payload))
  run.state, run.place = STATE.scheduled, place
  redis.call('HSET', RUNS, id, write_run(run))
  redis.call('ZADD', SCHEDULED, place, member(job.name, job.priority, place, id))
  if limited and string.byte(job.key) == RESERVED then
    holding().is_late(job.key)
  end
  wake(job.name)
  return STATE.scheduled
end

local function read_mark(key)
  local packed = redis.call('HGET', MARKS, 'K' .. key)
  local good, mark = pcall(cmsgpack.unpack, packed or '')
  return packed and good and type(mark) == 'table' and mark or nil
end

local function set_mark(key, mode, ttl, id, delay)
  marked = true
  redis.call('HSET', MARKS, 'K' .. key, cmsgpack.pack({ mode, now + delay + ttl, id }))
  if mode == THROTTLE then
    redis.call('ZADD', THROTTLED, now + delay + ttl, key)
  else
    redis.call('HSET', MARKS, 'I' .. id, string.char(mode) .. key)
  end
end

-- Return the state and the id of the job that has the new job's key. If the key was free, the new job takes it, and
-- nothing is returned.
local function take_key(new, added)
  local id, delay = new[1], new[5]
  local key, mode, ttl, size = unpack(new[8])
  local mark = read_mark(key)
  if mark then
    local known, record = lookup(mark[3])
    local state = added[mark[3]] and added[mark[3]][1] or known and known.state
    local throttled = mark[1] == THROTTLE
    if throttled and mark[2] > now or not throttled and state and not LINE_OF[state] then
      if mark[1] == DEBOUNCE and mode == DEBOUNCE then
        state = debounce(mark[3], record, known, new, size)
      end
      return { state or 0, false, mark[3] }
    end
    redis.call('HDEL', MARKS, 'I' .. mark[3])
    redis.call('ZREM', THROTTLED, key)
  end
  set_mark(key, mode, ttl, id, delay)
end
