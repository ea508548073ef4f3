-- ARGV[2]: limits by name, each as in GATES; [3]: 1 to remove them. Answers how many there were to remove.
local given, removed, changed = cmsgpack.unpack(ARGV[2]), 0, {}
local limits = holding().limits()
for name, limit in pairs(given) do
  local kept = limits[name]
  if ARGV[3] == '1' then
    removed = removed + (kept and 1 or 0)
    limits[name] = nil
    changed[#changed + 1] = kept and name
  elseif not kept or limit[4] >= kept[4] then
    limits[name] = limit
    changed[#changed + 1] = (not kept or cmsgpack.pack(kept) ~= cmsgpack.pack(limit)) and name or nil
  end
end
local slowest = 0
for _, limit in pairs(limits) do
  slowest = math.max(slowest, limit[1])
end
redis.call('HSET', GATES, 'limits', cmsgpack.pack(limits), 'slowest', string.format('%.0f', slowest))
for _, name in ipairs(changed) do
  holding().look_again(name)
end
finish()
return removed
