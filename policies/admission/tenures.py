"""Sessions that the KV gate has let in, and the tokens of their live contexts."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from operator import attrgetter

from policies.directory import Branch, Directory

IDLE_S = 300.0
"""A session unused for so long is not live: it gives up its place. Of the recorded pauses between turns 95 in 100 are
shorter."""

IDLE_COST = 0.1
"""What it takes to pass over a session that is not live, to one that is counted."""

MOST_KEYS = 250
"""Of one session, its sub-agents' among them: a look goes through all of them. Who comes beyond passes with it, and is
not counted."""


class Tenure:
    """A session that has been let in, until it is idle or sent back."""

    __slots__ = ("cold", "keys", "number", "since", "tokens")

    def __init__(self, key: bytes, now: float, tokens: int, number: int) -> None:
        self.keys = [key]
        """Its own, and those of its sub-agents."""
        self.since = now
        self.tokens = tokens
        """Of its live contexts, at its last count."""
        self.number = number
        """In the order in which they were let in."""
        self.cold = False
        """Its context was not believed to be in a KV cache, at its last count."""


_number = attrgetter("number")


class Tenures:
    """Of one gate. No call goes through all of them but `clear`: there may be more than can be counted between two
    requests."""

    def __init__(self, directory: Directory, pool: str = "") -> None:
        self.tokens = 0
        """Of all of them, each as of its last count."""
        self._directory = directory
        self._pool = pool
        self._by_key: dict[bytes, Tenure] = {}
        self._all: OrderedDict[Tenure, None] = OrderedDict()
        """In the order in which they were let in."""
        self._cold: list[Tenure] = []
        """Those that are cold, in the same order."""
        self._numbers = 0
        self._turns: deque[Tenure] = deque()
        """Whose turn to be counted it is; those that have ended are dropped when theirs comes."""
        self._unseen: Iterator[bytes] = iter(())
        """Keys of sessions that may be live."""

    def __len__(self) -> int:
        """Sessions that have been let in."""
        return len(self._all)

    @property
    def keys(self) -> int:
        """That are remembered, of all of them."""
        return len(self._by_key)

    @property
    def full(self) -> bool:
        """There is no room to remember another key."""
        return len(self._by_key) >= self._directory.max_sessions

    def of(self, key: bytes | None) -> Tenure | None:
        """The session that a key of its own, or of a sub-agent's, belongs to."""
        return None if key is None else self._by_key.get(key)

    def oldest(self) -> Tenure | None:
        """The one let in longest."""
        return next(iter(self._all), None)

    def first_to_go(self) -> Tenure | None:
        """The newest of the cold ones, or of all when none is cold."""
        return next(reversed(self._cold or self._all), None)

    def seek(self) -> None:
        """Begin to look for the sessions that are live, to let in all of them."""
        self.clear()
        self._unseen = iter(self._directory.keys())

    def find(self, most: int, now: float) -> bool:
        """Let in so many of them; those known longest come first. False when all have been found."""
        left = float(most)
        for key in self._unseen:
            branches = self._directory.branches(key, now)
            if any(_is_live(branch, now) for branch in branches) and self._is_own(branches):
                self._note(self.let_in(key, _tokens(branches, now), now), branches)
                left -= 1.0
            else:
                left -= IDLE_COST
            if left <= 0.0:
                return True
        return False

    def let_in(self, key: bytes, tokens: int, now: float) -> Tenure:
        """One more session."""
        self._numbers += 1
        self._by_key[key] = tenure = Tenure(key, now, tokens, self._numbers)
        self._all[tenure] = None
        self._turns.append(tenure)
        self.tokens += tokens
        return tenure

    def join(self, key: bytes | None, tenure: Tenure) -> None:
        """A sub-agent's key counts to the session, as far as there is room to remember it."""
        if key is not None and key not in self._by_key and not self.full and len(tenure.keys) < MOST_KEYS:
            self._by_key[key] = tenure
            tenure.keys.append(key)

    def end(self, tenure: Tenure) -> None:
        """It has to wait again. What it has in flight goes on: it is its next request that waits."""
        self.tokens -= tenure.tokens
        del self._all[tenure]
        self._set_cold(tenure, False)
        for key in tenure.keys:
            del self._by_key[key]

    def clear(self) -> None:
        """None is left."""
        self.tokens = 0
        self._by_key.clear()
        self._all.clear()
        self._cold.clear()
        self._turns.clear()
        self._unseen = iter(())

    def count(self, most: int, now: float) -> None:
        """Count anew those whose turn it is, until so many keys have been looked at. Those that are not live any more
        give up their places."""
        for _ in range(len(self._turns)):
            if most <= 0:
                return
            tenure = self._turns.popleft()
            if tenure in self._all:
                most -= len(tenure.keys)
                self._count(tenure, now)

    def _is_own(self, branches: Sequence[Branch]) -> bool:
        """Whether a session is the pool's: all its homes are in one."""
        pool = next((home.replica.pool for branch in branches for home in branch.homes), "")
        return pool == self._pool

    def _count(self, tenure: Tenure, now: float) -> None:
        tokens, alive = 0, now - tenure.since <= IDLE_S
        for key in tenure.keys[:]:
            branches = self._directory.branches(key, now)
            if any(_is_live(branch, now) for branch in branches):
                tokens += _tokens(branches, now)
                alive = True
            elif key is not tenure.keys[0]:
                tenure.keys.remove(key)
                del self._by_key[key]
        if not alive:
            self.end(tenure)
            return
        if tokens:
            self.tokens += tokens - tenure.tokens
            tenure.tokens = tokens
        self._note(tenure, self._directory.branches(tenure.keys[0], now))
        self._turns.append(tenure)

    def _note(self, tenure: Tenure, branches: Sequence[Branch]) -> None:
        """Whether less than half of its context is believed to be in a replica's KV cache."""
        held = max((home.tokens for branch in branches for home in branch.homes), default=0)
        self._set_cold(tenure, 2 * held <= tenure.tokens)

    def _set_cold(self, tenure: Tenure, cold: bool) -> None:
        if cold is tenure.cold:
            return
        tenure.cold = cold
        if cold:
            insort(self._cold, tenure, key=_number)
        else:
            del self._cold[bisect_left(self._cold, tenure.number, key=_number)]


def _is_live(branch: Branch, now: float) -> bool:
    return branch.open > 0 or now - branch.last_use <= IDLE_S


def _tokens(branches: Sequence[Branch], now: float) -> int:
    """Of a session's live conversations. What a fork shares with another is counted once, where both are known."""
    tokens = 0
    for branch in branches:
        if branch.homes and _is_live(branch, now):
            home = branch.homes[0]
            tokens += home.counted if branch.fork and home.resident else branch.size()
    return tokens
