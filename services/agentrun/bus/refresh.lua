-- Resets the idle time of entries that are still pending at this consumer; an entry that somebody else has claimed stays
-- his. JUSTID: the delivery counter is not raised.
-- KEYS: work stream.  ARGV: group, consumer, entry...  Returns the entries that are still this consumer's.
local mine = {}
for i = 3, #ARGV do
  if #redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[i], ARGV[i], 1, ARGV[2]) > 0 then
    for _, entry in ipairs(redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, ARGV[i], 'JUSTID')) do
      mine[#mine + 1] = entry
    end
  end
end
return mine
