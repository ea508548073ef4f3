-- Tell by its options whether we enqueued the job, as `decode_options` does. Any producer may have written them.
local function is_ours(text)
  local good, options = pcall(cjson.decode, text or '')
  return good and type(options) == 'table' and options['workers'] ~= nil
end
