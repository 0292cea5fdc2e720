"""Session -> homes. The Balancer's, not the policy's: it outlives a switch of policy."""

from __future__ import annotations

from collections import OrderedDict

from policies.types import Home

MAX_BRANCHES = 8
"""Conversations remembered under one key (a main thread, its title call, a few forks); the oldest go first."""


class Directory:
    """A bounded table of homes; the session used least recently goes first.

    A session unused for `idle_s` seconds is forgotten when it is next asked for.
    """

    def __init__(self, max_sessions: int = 200_000, idle_s: float = 3600.0) -> None:
        if max_sessions < 1:
            raise ValueError(f"max_sessions must be at least 1, got {max_sessions}")
        if not idle_s > 0:
            raise ValueError(f"idle_s must be more than 0 seconds, got {idle_s}")
        self.max_sessions = max_sessions
        self.idle_s = idle_s
        self.evicted = 0
        self._sessions: OrderedDict[bytes, list[Home]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def homes(self, key: bytes, now: float) -> list[Home]:
        """The session's homes, most recently used first. Not to be changed by the caller."""
        homes = self._sessions.get(key)
        if homes is None:
            return []
        if now - homes[0].last_use > self.idle_s:
            del self._sessions[key]
            return []
        return homes

    def place(self, key: bytes, fingerprint: int, replica_id: str, tokens: int, now: float) -> None:
        """Make the replica the home of this conversation, with `tokens` of it resident there already."""
        homes = self._sessions.get(key)
        if homes is None:
            self._sessions[key] = [Home(replica_id, tokens, now, fingerprint)]
            if len(self._sessions) > self.max_sessions:
                self._sessions.popitem(last=False)
                self.evicted += 1
            return
        self._sessions.move_to_end(key)
        for i, home in enumerate(homes):
            if home.fingerprint == fingerprint:
                home.tokens = tokens
                home.replica_id = replica_id
                home.last_use = now
                if i:
                    homes.insert(0, homes.pop(i))
                return
        homes.insert(0, Home(replica_id, tokens, now, fingerprint))
        del homes[MAX_BRANCHES:]

    def grow(self, key: bytes, fingerprint: int, replica_id: str, tokens: int, now: float) -> None:
        """Note what is resident after a turn, if the conversation still lives on that replica."""
        homes = self._sessions.get(key, [])
        for i, home in enumerate(homes):
            if home.fingerprint == fingerprint and home.replica_id == replica_id:
                home.tokens = tokens
                home.last_use = max(home.last_use, now)
                self._sessions.move_to_end(key)
                if i:
                    homes.insert(0, homes.pop(i))
                return

    def forget(self, key: bytes) -> bool:
        """Drop a session. True if it was known."""
        return self._sessions.pop(key, None) is not None
