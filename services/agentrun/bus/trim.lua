-- Removes what nobody needs any more: entries below the oldest pending one, or all delivered ones if none is pending.
-- Never by length: with no worker for a while a cap would drop entries that nobody has read.
-- KEYS: work stream.  ARGV: group.  Returns how many entries were removed.
local groups = redis.pcall('XINFO', 'GROUPS', KEYS[1])
for _, group in ipairs(groups) do
  local facts = {}
  for i = 1, #group, 2 do
    facts[group[i]] = group[i + 1]
  end
  if facts['name'] == ARGV[1] then
    local needed = redis.call('XPENDING', KEYS[1], ARGV[1])[2]
    if not needed then
      local ms, seq = string.match(facts['last-delivered-id'], '(%d+)-(%d+)')
      needed = ms .. '-' .. string.format('%.0f', tonumber(seq) + 1)
    end
    return redis.call('XTRIM', KEYS[1], 'MINID', '=', needed)
  end
end
return 0
