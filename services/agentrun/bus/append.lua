-- Appends events to the streams of their runs and publishes each one that was appended. The id is the event's number + 1,
-- so Redis refuses a number that the stream has reached already. One refused member never stops the others.
-- KEYS: the stream of each event's run.  ARGV: seconds to live, then id, channel and encoded event in turn.
-- Returns for each event 1 (appended), 0 (its number was there already) or the text of another error.
local results, touched = {}, {}
for i = 1, #KEYS do
  local at = 3 * i - 1
  local added = redis.pcall('XADD', KEYS[i], ARGV[at], 'e', ARGV[at + 2])
  if type(added) ~= 'table' then
    redis.call('PUBLISH', ARGV[at + 1], ARGV[at + 2])
    touched[KEYS[i]] = true
    results[i] = 1
  elseif string.find(added.err, 'equal or smaller', 1, true) then
    results[i] = 0
  else
    results[i] = added.err
  end
end
for key in pairs(touched) do
  redis.call('EXPIRE', key, ARGV[1])
end
return results
