-- Deletes consumers that are idle and hold nothing. Deleting a consumer drops its pending entries, so that it has none is
-- proved in the same script.
-- KEYS: work stream.  ARGV: group, idle milliseconds.  Returns the names of the deleted consumers.
local retired = {}
local consumers = redis.pcall('XINFO', 'CONSUMERS', KEYS[1], ARGV[1])
for _, consumer in ipairs(consumers) do
  local facts = {}
  for i = 1, #consumer, 2 do
    facts[consumer[i]] = consumer[i + 1]
  end
  if facts['pending'] == 0 and facts['idle'] >= tonumber(ARGV[2]) then
    redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], facts['name'])
    retired[#retired + 1] = facts['name']
  end
end
return retired
