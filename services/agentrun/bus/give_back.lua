-- Hands pending entries to the consumers whose they are. An entry that was acknowledged meanwhile is not pending and stays
-- so. JUSTID: the delivery counter is not raised.
-- KEYS: work stream.  ARGV: group, then entry and consumer in turn.  Returns how many were handed over.
local given = 0
for i = 2, #ARGV, 2 do
  given = given + #redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[i + 1], 0, ARGV[i], 'JUSTID')
end
return given
