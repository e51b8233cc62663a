-- Acknowledges entries. The hash forgets a run only if it holds this very entry: a newer one stays known.
-- An entry that was put back (see keep) may still wait to be delivered: it is deleted, as nobody has to see it any more.
-- KEYS: work stream, hash of entries.  ARGV: group, then run id ('' if unknown) and entry in turn.
-- Returns how many were pending.
local function last_delivered()
  for _, group in ipairs(redis.pcall('XINFO', 'GROUPS', KEYS[1])) do
    local facts = {}
    for i = 1, #group, 2 do
      facts[group[i]] = group[i + 1]
    end
    if facts['name'] == ARGV[1] then
      return facts['last-delivered-id']
    end
  end
end

local last = last_delivered()
local pending = 0
for i = 2, #ARGV, 2 do
  local run, entry = ARGV[i], ARGV[i + 1]
  local acknowledged = redis.call('XACK', KEYS[1], ARGV[1], entry)
  pending = pending + acknowledged
  if run ~= '' and redis.call('HGET', KEYS[2], run) == entry then
    redis.call('HDEL', KEYS[2], run)
  end
  if acknowledged > 0 and #redis.call('XRANGE', KEYS[1], '(' .. last, entry, 'COUNT', 1) > 0 then
    redis.call('XDEL', KEYS[1], entry)
  end
end
return pending
