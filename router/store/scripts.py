"""What Redis does in one step, in Lua. Each touches the keys that it is given and no others.

Those of sessions take several at once, as a command of its own for each would cost the router more than all else that
it does for them. A cluster gives one at a time: its keys are not in one place.

A session is a hash: a field for each home, and in it 16 digits of microseconds by the server's clock, then the note.
"""

from __future__ import annotations

from hashlib import sha1

_NOW = "local t = redis.call('TIME')\nlocal now = t[1] * 1000000 + t[2]\n"

_HOMES = """
local function homes(key, command)
  local found = redis.pcall(command, key)
  if type(found) == 'number' or not found.err then return found end
  if string.sub(found.err, 1, 9) == 'WRONGTYPE' then return nil end
  return redis.call(command, key)
end
"""
"""What a command says of a session's homes; nothing where somebody else has put something else in its place. That
session is not shared then, and all others are."""

_PUT = """
local function put(key, at, home, note)
  if note == '' then
    redis.call('HDEL', key, home)
    return
  end
  redis.call('HSET', key, home, string.format('%016.0f', at) .. note)
end
local function bound(key, most, ttl)
  local over = redis.call('HLEN', key) - most
  if over > 0 then
    local all, homes = redis.call('HGETALL', key), {}
    for i = 1, #all, 2 do homes[#homes + 1] = {string.sub(all[i + 1], 1, 16), all[i]} end
    table.sort(homes, function(a, b) return a[1] < b[1] end)
    for i = 1, over do redis.call('HDEL', key, homes[i][2]) end
  end
  redis.call('PEXPIRE', key, ttl)
end
local at = 3
for _, key in ipairs(KEYS) do
  local last = at + 2 * ARGV[at]
  if homes(key, 'HLEN') then
    local from = since(key)
    for i = at + 1, last, 2 do
      if wanted(key, ARGV[i]) then put(key, from + i, ARGV[i], ARGV[i + 1]) end
    end
    bound(key, tonumber(ARGV[2]), ARGV[1])
  end
  at = last + 1
end
"""


class Script:
    """Its source, and the digest by which a server that has seen it knows it."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.sha = sha1(source.encode(), usedforsecurity=False).hexdigest()


CLAIM = Script(
    _NOW
    + _HOMES
    + """
local answer = {string.format('%016.0f', now)}
for i, key in ipairs(KEYS) do
  local known = homes(key, 'HGETALL')
  if known then
    if #known == 0 then
      redis.call('HSET', key, ARGV[2 * i], string.format('%016.0f', now) .. ARGV[2 * i + 1])
    end
    redis.call('PEXPIRE', key, ARGV[1])
  end
  answer[i + 1] = known or {}
end
return answer
"""
)
"""TTL in milliseconds, then home and note for each key. Answers with the time, and for each key with fields and values
that were there."""

PUT = Script(
    _NOW
    + _HOMES
    + """
local function wanted() return true end
local function since() return now end
"""
    + _PUT
)
"""TTL, most homes, then for each key how many homes, and home and note of each; an empty note takes the home out."""

RESTORE = Script(
    _NOW
    + _HOMES
    + """
local function wanted(key, home) return redis.call('HEXISTS', key, home) == 0 end
local function since(key)
  local known, first = redis.call('HGETALL', key), now
  for i = 2, #known, 2 do
    first = math.min(first, (tonumber(string.sub(known[i], 1, 16)) or now) - #ARGV)
  end
  return first
end
"""
    + _PUT
)
"""As PUT, of homes that are not there: behind those that are, which were told later."""

SAY = Script(
    _NOW
    + """
local last = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)[1]
local ms, number = math.floor(now / 1000), 0
if last then
  local before
  before, number = string.match(last[1], '(%d+)-(%d+)')
  ms = math.max(ms, tonumber(before))
end
local id = string.format('%.0f-%.0f', ms, number + 1)
redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[1], id, 'm', ARGV[3])
redis.call('XTRIM', KEYS[1], 'MINID', string.format('%.0f-0', ms - ARGV[2]))
"""
)
"""How many to keep, for how many milliseconds, message. They are numbered without a gap, so that a reader sees when
some are missing."""
