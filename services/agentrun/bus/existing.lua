-- Which of these entries will still be handled: in the stream, and either not delivered yet or pending.
-- KEYS: work stream.  ARGV: group, entry...  Returns those entries.
local existing, delivered = {}, nil
local groups = redis.pcall('XINFO', 'GROUPS', KEYS[1])
for _, group in ipairs(groups) do
  local name, last = nil, nil
  for i = 1, #group, 2 do
    if group[i] == 'name' then
      name = group[i + 1]
    elseif group[i] == 'last-delivered-id' then
      last = group[i + 1]
    end
  end
  if name == ARGV[1] then
    delivered = last
  end
end
for i = 2, #ARGV do
  local entry = ARGV[i]
  if #redis.call('XRANGE', KEYS[1], entry, entry) > 0 then
    local waiting = not delivered or #redis.call('XRANGE', KEYS[1], '(' .. delivered, entry, 'COUNT', 1) > 0
    if waiting or #redis.call('XPENDING', KEYS[1], ARGV[1], entry, entry, 1) > 0 then
      existing[#existing + 1] = entry
    end
  end
end
return existing
