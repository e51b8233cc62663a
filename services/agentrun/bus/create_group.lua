-- Creates stream and group if they are missing, and notes when: what was known before is lost then.
-- The group begins at 0, so that what was added before it is delivered.
-- KEYS: work stream, birth of the group.  ARGV: group.
local made = redis.pcall('XGROUP', 'CREATE', KEYS[1], ARGV[1], '0', 'MKSTREAM')
if made['err'] then
  return string.find(made['err'], 'BUSYGROUP', 1, true) and 0 or made
end
local time = redis.call('TIME')
redis.call('SET', KEYS[2], string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000)))
return 1
