-- Claims one page of entries that have been idle too long, and reads which runs they hold: JUSTID, so that the delivery
-- counter is not raised, returns ids alone. Entries that are no longer in the stream leave the pending list here (Redis
-- does that itself) and are reported.
-- KEYS: work stream.  ARGV: group, consumer, idle milliseconds, cursor, page size.
-- Returns the next cursor, entry and run ('' if it has none) in turn, and the deleted entries.
local claimed = redis.call('XAUTOCLAIM', KEYS[1], ARGV[1], ARGV[2], ARGV[3], ARGV[4], 'COUNT', ARGV[5], 'JUSTID')
local found, deleted = {}, claimed[3]
for _, entry in ipairs(claimed[2]) do
  local held = redis.call('XRANGE', KEYS[1], entry, entry)[1]
  local run = ''
  for i = 1, held and #held[2] or 0, 2 do
    if held[2][i] == 'run' then
      run = held[2][i + 1]
    end
  end
  found[#found + 1] = entry
  found[#found + 1] = run
end
return { claimed[1], found, deleted }
