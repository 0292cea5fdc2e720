"""What Redis does in one step, in Lua. Each touches the one key that it is given, so that a cluster can run it.

A session is a hash: a field for each home, and in it 16 digits of microseconds by the server's clock, then the note.
"""

from __future__ import annotations

from hashlib import sha1

_NOW = "local t = redis.call('TIME')\nlocal now = t[1] * 1000000 + t[2]\n"

_PUT = """
local function put(i, home, note)
  if note == '' then
    redis.call('HDEL', KEYS[1], home)
    return
  end
  redis.call('HSET', KEYS[1], home, string.format('%016.0f', now + i) .. note)
end
local function bound(most, ttl)
  local over = redis.call('HLEN', KEYS[1]) - most
  if over > 0 then
    local all, homes = redis.call('HGETALL', KEYS[1]), {}
    for i = 1, #all, 2 do homes[#homes + 1] = {string.sub(all[i + 1], 1, 16), all[i]} end
    table.sort(homes, function(a, b) return a[1] < b[1] end)
    for i = 1, over do redis.call('HDEL', KEYS[1], homes[i][2]) end
  end
  redis.call('PEXPIRE', KEYS[1], ttl)
end
"""


class Script:
    """Its source, and the digest by which a server that has seen it knows it."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.sha = sha1(source.encode(), usedforsecurity=False).hexdigest()


CLAIM = Script(
    _NOW
    + """
local known = redis.call('HGETALL', KEYS[1])
if #known == 0 then
  redis.call('HSET', KEYS[1], ARGV[2], string.format('%016.0f', now) .. ARGV[3])
end
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return {string.format('%016.0f', now), known}
"""
)
"""TTL in milliseconds, home, note. Answers with the time and with fields and values that were there."""

PUT = Script(
    _NOW
    + _PUT
    + """
for i = 3, #ARGV, 2 do put(i, ARGV[i], ARGV[i + 1]) end
bound(tonumber(ARGV[2]), ARGV[1])
"""
)
"""TTL, most homes, then home and note of each; an empty note takes the home out."""

RESTORE = Script(
    _NOW
    + _PUT
    + """
for i = 3, #ARGV, 2 do
  if redis.call('HEXISTS', KEYS[1], ARGV[i]) == 0 then put(i, ARGV[i], ARGV[i + 1]) end
end
bound(tonumber(ARGV[2]), ARGV[1])
"""
)
"""As PUT, of homes that are not there."""

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
