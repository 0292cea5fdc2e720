"""Sessions that the KV gate has let in, and the tokens of their live contexts."""

from __future__ import annotations

from collections.abc import Sequence

from policies.directory import Branch, Directory

IDLE_S = 300.0
"""A session unused for so long is not live: it gives up its place. Of the recorded pauses between turns 95 in 100 are
shorter."""


class Tenure:
    """A session that has been let in, until it is idle or sent back."""

    __slots__ = ("keys", "since", "tokens")

    def __init__(self, key: bytes, now: float, tokens: int) -> None:
        self.keys = [key]
        """Its own, and those of its sub-agents."""
        self.since = now
        self.tokens = tokens
        """Of its live contexts, at the last count."""


class Tenures:
    """Of one gate. None while it does not act."""

    def __init__(self, directory: Directory, pool: str = "") -> None:
        self.tokens = 0
        """Of all of them, as of the last count."""
        self._directory = directory
        self._pool = pool
        self._by_key: dict[bytes, Tenure] = {}

    def __bool__(self) -> bool:
        return bool(self._by_key)

    @property
    def full(self) -> bool:
        """There is no room to remember another key."""
        return len(self._by_key) >= self._directory.max_sessions

    def of(self, key: bytes | None) -> Tenure | None:
        """The session that a key of its own, or of a sub-agent's, belongs to."""
        return None if key is None else self._by_key.get(key)

    def all(self) -> list[Tenure]:
        """Each once, in the order in which they were let in."""
        return list({id(tenure): tenure for tenure in self._by_key.values()}.values())

    def begin(self, live: dict[bytes, int], now: float) -> None:
        """These have been let in, and no others: tokens by key."""
        self._by_key = {key: Tenure(key, now, tokens) for key, tokens in live.items()}
        self.tokens = sum(live.values())

    def let_in(self, key: bytes, tokens: int, now: float) -> Tenure:
        """One more session."""
        self._by_key[key] = tenure = Tenure(key, now, tokens)
        self.tokens += tokens
        return tenure

    def join(self, key: bytes | None, tenure: Tenure) -> None:
        """A sub-agent's key counts to the session, as far as there is room to remember it."""
        if key is not None and key not in self._by_key and not self.full:
            self._by_key[key] = tenure
            tenure.keys.append(key)

    def send_back(self, tenure: Tenure) -> None:
        """It has to wait again. What it has in flight goes on: it is its next request that waits."""
        self.tokens -= tenure.tokens
        self._end(tenure)

    def clear(self) -> None:
        """None is left."""
        self._by_key.clear()
        self.tokens = 0

    def count(self, now: float) -> None:
        """Count anew. Those that are not live any more give up their places."""
        self.tokens = 0
        for tenure in self.all():
            self._count(tenure, now)

    def live(self, now: float) -> dict[bytes, int]:
        """Tokens of all sessions of the pool that are live, let in or not, by key; those used longest ago first."""
        lately = list(self._directory.lately(now - IDLE_S))
        return {key: _tokens(branches, now) for key, branches in reversed(lately) if self._is_own(branches)}

    def is_warm(self, tenure: Tenure, now: float) -> bool:
        """Whether most of its context is believed to be in a replica's KV cache."""
        branches = self._directory.branches(tenure.keys[0], now)
        held = max((home.tokens for branch in branches for home in branch.homes), default=0)
        return 2 * held > tenure.tokens

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
            self._end(tenure)
            return
        tenure.tokens = tokens or tenure.tokens
        self.tokens += tenure.tokens

    def _end(self, tenure: Tenure) -> None:
        for key in tenure.keys:
            del self._by_key[key]


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
