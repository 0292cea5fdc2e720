"""Session -> conversations -> homes. The Balancer's, not the policy's: it outlives a switch of policy.

Under one key there may be several conversations, told apart by fingerprint (a main thread, its title call, fresh
subagents), and several branches of one, told apart by the chained hashes of their raw blocks (forks that share a
long beginning). Each branch may have KV on several replicas.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from struct import pack

from policies.residency import Home

MAX_BRANCHES = 16
"""Branches remembered under one key; the shortest idle ones go first."""

MAX_HOMES = 4
"""Replicas remembered for one branch; the oldest go first."""

STRIDE = 4
"""Of the blocks' hashes every fourth is kept, 4 bytes of it: 16 KiB of body, about 4,000 tokens, for each."""
_BYTES = 4


class Branch:
    """One linear conversation."""

    __slots__ = ("chain", "fingerprint", "fork", "homes", "key", "last_use", "open", "ratio")

    def __init__(self, key: bytes, fingerprint: int, chain: bytes, now: float, fork: bool = False) -> None:
        self.key = key
        self.fingerprint = fingerprint
        """0 while nobody looked."""
        self.chain = chain
        """Of its last request, see `condense`; empty when nobody looked."""
        self.fork = fork
        """It began while another branch of its conversation was under way."""
        self.homes: list[Home] = []
        """Latest first."""
        self.open = 0
        """Its requests under way."""
        self.last_use = now
        self.ratio = 1.0
        """Prompt tokens reported for each estimated."""

    def size(self) -> int:
        """The most tokens that any one replica held of it."""
        return max((home.whole for home in self.homes), default=0)

    def home_on(self, replica: object) -> Home | None:
        """Its home on that very replica object."""
        for home in self.homes:
            if home.replica is replica:
                return home
        return None


class Directory:
    """A bounded table; the session used least recently goes first.

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
        self._sessions: OrderedDict[bytes, list[Branch]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def branches(self, key: bytes, now: float) -> Sequence[Branch]:
        """The session's branches, most recently used first. Not to be changed by the caller."""
        branches = self._sessions.get(key)
        if branches is None:
            return ()
        if now - branches[0].last_use > self.idle_s and not any(branch.open for branch in branches):
            self.forget(key)
            return ()
        return branches

    def put(self, branch: Branch, now: float) -> None:
        """Note that the branch is used, whether new or known."""
        branch.last_use = max(branch.last_use, now)
        branches = self._sessions.get(branch.key)
        if branches is None:
            self._sessions[branch.key] = [branch]
            if len(self._sessions) > self.max_sessions:
                self._forget(self._sessions.popitem(last=False)[1])
                self.evicted += 1
            return
        self._sessions.move_to_end(branch.key)
        if branches[0] is branch:
            return
        if branch in branches:
            branches.remove(branch)
        branches.insert(0, branch)
        if len(branches) > MAX_BRANCHES:
            # The main thread is the longest; of a fan-out's short branches the oldest goes.
            idle = [other for other in reversed(branches) if not other.open and other is not branch]
            least = min(idle, key=Branch.size) if idle else branches[-1]
            branches.remove(least)
            self._forget([least])

    def holds(self, branch: Branch) -> bool:
        """Whether the branch is still remembered."""
        return branch in self._sessions.get(branch.key, ())

    def forget(self, key: bytes) -> bool:
        """Drop a session. True if it was known."""
        branches = self._sessions.pop(key, None)
        if branches is None:
            return False
        self._forget(branches)
        return True

    def _forget(self, branches: Sequence[Branch]) -> None:
        for branch in branches:
            for home in branch.homes:
                home.replica.cache.forget(home)


def condense(blocks: Sequence[int]) -> bytes:
    """A request's block hashes as a branch keeps them."""
    kept = [block & 0xFFFFFFFF for block in blocks[STRIDE - 1 :: STRIDE]]
    return pack(f">{len(kept)}I", *kept)


def shared(one: bytes, other: bytes) -> int:
    """How many leading links two condensed chains have in common: as they are chained, equal once is equal before."""
    low, high = 0, min(len(one), len(other)) // _BYTES
    while low < high:
        middle = (low + high + 1) // 2
        at = (middle - 1) * _BYTES
        if one[at : at + _BYTES] == other[at : at + _BYTES]:
            low = middle
        else:
            high = middle - 1
    return low


def links(chain: bytes) -> int:
    """Length of a condensed chain."""
    return len(chain) // _BYTES
