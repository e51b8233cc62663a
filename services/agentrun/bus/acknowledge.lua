-- Acknowledges entries. The hash forgets a run only if it holds this very entry: a newer one stays known.
-- KEYS: work stream, hash of entries.  ARGV: group, then run id ('' if unknown) and entry in turn.
-- Returns how many were pending.
local pending = 0
for i = 2, #ARGV, 2 do
  local run, entry = ARGV[i], ARGV[i + 1]
  pending = pending + redis.call('XACK', KEYS[1], ARGV[1], entry)
  if run ~= '' and redis.call('HGET', KEYS[2], run) == entry then
    redis.call('HDEL', KEYS[2], run)
  end
end
return pending
