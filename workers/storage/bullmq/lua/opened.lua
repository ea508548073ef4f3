-- BullMQ's Lua opens what each job has packed. What all jobs of a call share is opened once, and comes as a table.
local cmsgpack = {
  pack = cmsgpack.pack,
  unpack = function(value)
    return type(value) == 'table' and value or cmsgpack.unpack(value)
  end,
}
