-- What waits, what is being worked on, and who works, in one consistent look.
-- The lag that Redis reports is empty after a deletion and wrong after trimming, so a short backlog is always counted;
-- a long one is the reported lag, never more than the stream holds, or a bounded count if there is none.
-- A missing stream or group is created at its beginning, and noted when: workers at zero never would.
-- KEYS: work stream, birth of the group.  ARGV: group, idle milliseconds, always count up to, count at most, look at most at pending entries.
-- Returns undelivered, pending, pending and idle that long, the age of the group in milliseconds (-1: not noted), then each consumer
-- that holds entries and how many.
local function read_group()
  for _, group in ipairs(redis.pcall('XINFO', 'GROUPS', KEYS[1])) do
    local facts = {}
    for i = 1, #group, 2 do
      facts[group[i]] = group[i + 1]
    end
    if facts['name'] == ARGV[1] then
      return facts
    end
  end
  return nil
end

local function count_forward(last, limit)
  return #redis.call('XRANGE', KEYS[1], '(' .. last, '+', 'COUNT', limit)
end

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local facts = read_group()
if not facts then
  redis.call('XGROUP', 'CREATE', KEYS[1], ARGV[1], '0', 'MKSTREAM')
  redis.call('SET', KEYS[2], string.format('%.0f', now))
  facts = read_group()
end
local born = redis.call('GET', KEYS[2])
local age = born and math.max(now - tonumber(born), 0) or -1
local last = facts['last-delivered-id']
local undelivered = count_forward(last, ARGV[3])
if undelivered >= tonumber(ARGV[3]) then
  local lag = facts['lag']
  if lag then
    undelivered = math.max(undelivered, math.min(lag, redis.call('XLEN', KEYS[1])))
  else
    undelivered = count_forward(last, ARGV[4])
  end
end
if facts['pending'] == 0 then
  return { undelivered, 0, 0, age }
end
local idle = #redis.call('XPENDING', KEYS[1], ARGV[1], 'IDLE', ARGV[2], '-', '+', ARGV[5])
local answer = { undelivered, facts['pending'], idle, age }
for _, held in ipairs(redis.call('XPENDING', KEYS[1], ARGV[1])[4]) do
  answer[#answer + 1] = held[1]
  answer[#answer + 1] = tonumber(held[2])
end
return answer
