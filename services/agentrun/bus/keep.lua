-- Keeps the entries of runs that this consumer works on, and puts back what the stream has lost. An entry that somebody else has
-- claimed, and one that waits to be delivered, stay as they are. JUSTID: the delivery counter is not raised.
-- What is put back is pending at once. It counts as delivered, unless entries before it have not been: those must not be skipped, so
-- it is delivered once more, acknowledged by its reader since the run is leased, and put back again.
-- KEYS: work stream, hash of entries.  ARGV: group, consumer, then run id and entry in turn.
-- Returns for each run the entry that this consumer holds, '' for none.
local function refresh(entry)
  return #redis.call('XPENDING', KEYS[1], ARGV[1], entry, entry, 1, ARGV[2]) > 0
    and #redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, entry, 'JUSTID') > 0
end

local function all_delivered()
  for _, group in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
    local facts = {}
    for i = 1, #group, 2 do
      facts[group[i]] = group[i + 1]
    end
    if facts['name'] == ARGV[1] then
      return #redis.call('XRANGE', KEYS[1], '(' .. facts['last-delivered-id'], '+', 'COUNT', 1) == 0
    end
  end
end

local function put_back(run)
  local delivered = all_delivered()
  local entry = redis.call('XADD', KEYS[1], '*', 'run', run)
  redis.call('HSET', KEYS[2], run, entry)
  local claim = { 'XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, entry, 'FORCE', 'JUSTID' }
  if delivered then
    claim[#claim + 1] = 'LASTID'
    claim[#claim + 1] = entry
  end
  redis.call(unpack(claim))
  return entry
end

local held = {}
for i = 3, #ARGV, 2 do
  local run, entry = ARGV[i], ARGV[i + 1]
  local known = redis.call('HGET', KEYS[2], run)
  if refresh(entry) then
    if not known then
      redis.call('HSET', KEYS[2], run, entry)
    end
  elseif known and refresh(known) then
    entry = known
  elseif known and #redis.call('XRANGE', KEYS[1], known, known) > 0 then
    entry = ''
  else
    entry = put_back(run)
  end
  held[#held + 1] = entry
end
return held
