-- Adds an entry for each run that has none. The hash holds a run exactly as long as the stream holds its entry, so a
-- second publication changes nothing.
-- KEYS: work stream, hash of entries.  ARGV: wake channel, run id...  Returns how many were added.
local added = 0
for i = 2, #ARGV do
  if redis.call('HEXISTS', KEYS[2], ARGV[i]) == 0 then
    local entry = redis.call('XADD', KEYS[1], '*', 'run', ARGV[i])
    redis.call('HSET', KEYS[2], ARGV[i], entry)
    added = added + 1
  end
end
redis.call('PUBLISH', ARGV[1], added)
return added
