-- Removes what nobody needs any more: delivered entries below the oldest pending one, or all of them if none is pending.
-- Never by length: with no worker for a while a cap would drop entries that nobody has read. An entry that was put back (see keep) may
-- be pending while older ones still wait to be delivered.
-- KEYS: work stream.  ARGV: group.  Returns how many entries were removed.
local groups = redis.pcall('XINFO', 'GROUPS', KEYS[1])
for _, group in ipairs(groups) do
  local facts = {}
  for i = 1, #group, 2 do
    facts[group[i]] = group[i + 1]
  end
  if facts['name'] == ARGV[1] then
    local last = facts['last-delivered-id']
    local needed = redis.call('XPENDING', KEYS[1], ARGV[1])[2]
    if not needed or #redis.call('XRANGE', KEYS[1], '(' .. last, '(' .. needed, 'COUNT', 1) > 0 then
      local ms, seq = string.match(last, '(%d+)-(%d+)')
      needed = ms .. '-' .. string.format('%.0f', tonumber(seq) + 1)
    end
    return redis.call('XTRIM', KEYS[1], 'MINID', '=', needed)
  end
end
return 0
