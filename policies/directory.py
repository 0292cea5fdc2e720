"""Session -> conversations -> homes. The Balancer's, not the policy's: it outlives a switch of policy.

Under one key there may be several conversations, told apart by fingerprint (a main thread, its title call, fresh
subagents), and several branches of one, told apart by the chained hashes of their raw blocks (forks that share a
long beginning). Each branch may have KV on several replicas.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import lru_cache
from struct import Struct
from typing import TYPE_CHECKING, Final

from policies.residency import Home

if TYPE_CHECKING:
    from policies.types import Replica

MAX_BRANCHES: Final = 16
"""Branches remembered under one key; the shortest idle ones go first."""

MAX_HOMES: Final = 4
"""Replicas remembered for one branch; the oldest go first."""

STRIDE: Final = 4
"""Of the blocks' hashes every fourth is kept: 16 KiB of body, about 4,000 tokens, for each."""

LINK_BYTES: Final = 4
"""Kept of each hash, its last ones."""


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
        most = 0
        for home in self.homes:
            if home.whole > most:
                most = home.whole
        return most

    def home_on(self, replica: object) -> Home | None:
        """Its home on that very replica object."""
        for home in self.homes:
            if home.replica is replica:
                return home
        return None

    def lead(self, replica: Replica, now: float) -> Home:
        """Its home there, known or new, put first."""
        homes = self.homes
        if homes and homes[0].replica is replica:
            return homes[0]
        home = self.home_on(replica)
        if home is None:
            home = Home(replica, now)
        else:
            homes.remove(home)
        homes.insert(0, home)
        for old in homes[MAX_HOMES:]:
            old.replica.cache.forget(old)
        del homes[MAX_HOMES:]
        return home


class Directory:
    """A bounded table; the session used least recently goes first.

    A session unused for `idle_s` seconds is not known any more.
    """

    def __init__(self, max_sessions: int = 200_000, idle_s: float = 3600.0) -> None:
        if max_sessions < 1:
            raise ValueError(f"max_sessions must be at least 1, got {max_sessions}")
        if not idle_s > 0:
            raise ValueError(f"idle_s must be more than 0 seconds, got {idle_s}")
        self.max_sessions = max_sessions
        self.idle_s = idle_s
        self.evicted = 0
        self.branch_count = 0
        """Branches of all sessions."""
        self._sessions: OrderedDict[bytes, list[Branch]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def branches(self, key: bytes, now: float) -> Sequence[Branch]:
        """The session's branches, most recently used first. Not to be changed by the caller."""
        branches = self._sessions.get(key)
        if branches is None or (now - branches[0].last_use > self.idle_s and self._idle(branches)):
            return ()
        return branches

    def lately(self, since: float) -> Iterator[tuple[bytes, Sequence[Branch]]]:
        """Sessions used at `since` or later, the latest first. Not to be used while the directory changes."""
        for key, branches in reversed(self._sessions.items()):
            if branches[0].last_use < since:
                return
            yield key, branches

    def keys(self) -> list[bytes]:
        """Of all sessions, in no order. A list of its own, which stays as it is whatever becomes of the directory."""
        return list(dict.keys(self._sessions))  # a seventh of what the table's own order costs

    def _idle(self, branches: Sequence[Branch]) -> bool:
        return not any(branch.open for branch in branches)

    def put(self, branch: Branch, now: float) -> None:
        """Note that the branch is used, whether new or known."""
        branches = self._sessions.get(branch.key)
        if branches and branch not in branches and now - branches[0].last_use > self.idle_s and self._idle(branches):
            self.forget(branch.key)
            branches = None
        if now > branch.last_use:
            branch.last_use = now
        if branches is None:
            self._sessions[branch.key] = [branch]
            self.branch_count += 1
            if len(self._sessions) > self.max_sessions:
                self._forget(self._sessions.popitem(last=False)[1])
                self.evicted += 1
            return
        self._sessions.move_to_end(branch.key)
        if branches[0] is branch:
            return
        if branch in branches:
            branches.remove(branch)
        else:
            self.branch_count += 1
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
        self.branch_count -= len(branches)
        for branch in branches:
            for home in branch.homes:
                home.replica.cache.forget(home)


def condense(blocks: Sequence[int]) -> bytes:
    """A request's block hashes as a branch keeps them."""
    if len(blocks) < STRIDE:
        return b""
    kept = blocks[STRIDE - 1 :: STRIDE]
    halves = memoryview(_form_of(len(kept)).pack(*kept)).cast("I")
    return halves[1::2].tobytes()  # of each hash the last four of its eight bytes


@lru_cache(maxsize=1024)
def _form_of(count: int) -> Struct:
    """Of so many hashes: finding it anew would take as long as packing them."""
    return Struct(f">{count}Q")


def shared(one: bytes, other: bytes) -> int:
    """How many leading links two condensed chains have in common: as they are chained, equal once is equal before."""
    low, high = 0, min(len(one), len(other)) // LINK_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        at = (middle - 1) * LINK_BYTES
        if one[at : at + LINK_BYTES] == other[at : at + LINK_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low


def links(chain: bytes) -> int:
    """Length of a condensed chain."""
    return len(chain) // LINK_BYTES
