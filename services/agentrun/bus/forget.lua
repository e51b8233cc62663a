-- Removes hash values whose entry is no longer in the stream: their runs have ended, or the sweep publishes them anew.
-- KEYS: work stream, entries hash.  ARGV: cursor, fields per call, idle milliseconds.  Returns the next cursor ('0': round) and how many went.
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local page = redis.call('HSCAN', KEYS[2], ARGV[1], 'COUNT', ARGV[2])
local forgotten = 0
for i = 1, #page[2], 2 do
  local entry = page[2][i + 1]
  local added = tonumber(string.match(entry, '^(%d+)-'))
  if now - added > tonumber(ARGV[3]) and #redis.call('XRANGE', KEYS[1], entry, entry) == 0 then
    redis.call('HDEL', KEYS[2], page[2][i])
    forgotten = forgotten + 1
  end
end
return { page[1], forgotten }
