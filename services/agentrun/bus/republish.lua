-- Adds a new entry for each run, and acknowledges the one that the caller holds and the one in the hash: afterwards the
-- hash holds the new one and no older one is pending. An older one that nobody has read yet is read and acknowledged later.
-- KEYS: work stream, hash of entries.  ARGV: group, wake channel, then run id and held entry ('' for none) in turn.
-- Returns the new entries.
local entries = {}
for i = 3, #ARGV, 2 do
  local run, held = ARGV[i], ARGV[i + 1]
  local old = redis.call('HGET', KEYS[2], run)
  local entry = redis.call('XADD', KEYS[1], '*', 'run', run)
  redis.call('HSET', KEYS[2], run, entry)
  if held ~= '' then
    redis.call('XACK', KEYS[1], ARGV[1], held)
  end
  if old and old ~= held then
    redis.call('XACK', KEYS[1], ARGV[1], old)
  end
  entries[#entries + 1] = entry
end
redis.call('PUBLISH', ARGV[2], #entries)
return entries
