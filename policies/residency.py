"""What a replica's KV cache is believed to hold: a shadow of its own LRU, fed by what is sent there.

Two tiers as in SGLang with HiCache: what was used last is in GPU memory; what falls out of it is still in the host
tier, which is written through and so holds, with the GPU's, the larger of both capacities. A conversation at the
tail is shortened from its end, as the engine evicts the leaves of its radix tree first.

Believing too little is a catastrophe (the session is sent away from its cache), believing too much costs a tenth:
capacities are taken HEADROOM times what the engine says, and corrected by what it reports as cached.
"""

from __future__ import annotations

from collections import OrderedDict
from math import exp
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from policies.types import Replica

HEADROOM: Final = 1.25
"""Placement study, section 7: 1.25 to 1.5."""

DEFAULT_TOKENS: Final = 1_000_000
"""Of a replica that does not tell: more than most GPUs hold, since too much is the lesser evil."""

LIVE_TAU_S: Final = 600.0
"""A session idle for so long counts as a third of a live one (same study: 300 to 1,800 s are alike)."""

DEAD_BAND_TOKENS: Final = 4096
"""Differences up to this between belief and report are pages, templates and estimates."""
GROW: Final = 1.1
SHRINK: Final = 1.03
"""Steps of a correction: quick to believe more, slow to believe less, which a rewritten history also looks like. So
belief begins above what the engine says and comes down to the truth: to stay above it was measured to be worse."""
SCALE_BOUNDS = (0.2, 5.0)

LIVE_GRID_S: Final = 1.0
"""Step in which the live sum decays, seconds: a thousandth of its time constant, and an exponential less a request."""


class Home:
    """One conversation's KV on one replica."""

    __slots__ = (
        "_live",
        "_live_at",
        "counted",
        "last_use",
        "on_host",
        "replica",
        "resident",
        "tokens",
        "whole",
    )

    def __init__(self, replica: Replica, now: float) -> None:
        self.replica = replica
        self.tokens = 0
        """Tokens believed to be there."""
        self.whole = 0
        """Tokens that were there after its last use, however much was evicted since."""
        self.resident = False
        """Whether the shadow still holds it. When it does not, `tokens` are 0."""
        self.on_host = False
        """Fallen out of GPU memory."""
        self.counted = 0
        """Tokens by which it takes room: less than `tokens` for a fork, whose beginning another home counts."""
        self.last_use = now
        self._live = 0.0
        self._live_at = now


class Shadow:
    """The cache of one replica, in tokens."""

    __slots__ = (
        "_gpu",
        "_gpu_limit",
        "_gpu_sum",
        "_host",
        "_host_sum",
        "_live",
        "_live_at",
        "capacity",
        "corrections",
        "gpu_tokens",
        "host_tokens",
        "scale",
    )

    def __init__(self) -> None:
        self.gpu_tokens: int | None = None
        """GPU capacity as the engine tells it."""
        self.host_tokens: int | None = None
        """Capacity of its host tier; None when there is none, or it is not told."""
        self.scale = 1.0
        """Correction of the capacity, learned from reports of cached tokens."""
        self.corrections = 0
        self.capacity = 0.0
        """Tokens believed to fit, both tiers."""
        self._gpu: OrderedDict[Home, None] = OrderedDict()
        self._host: OrderedDict[Home, None] = OrderedDict()
        self._gpu_sum = self._host_sum = 0
        self._live = self._live_at = 0.0
        self._measure()

    def __len__(self) -> int:
        """Homes it holds."""
        return len(self._gpu) + len(self._host)

    @property
    def held_tokens(self) -> int:
        """Tokens believed to be there, either tier."""
        return self._gpu_sum + self._host_sum

    def homes_since(self, at: float) -> int:
        """Homes used at `at` or later."""
        count = 0
        for tier in (self._gpu, self._host):
            for home in reversed(tier):
                if home.last_use < at:
                    break
                count += 1
        return count

    def live(self, now: float) -> float:
        """Tokens of its conversations, each weighed by how lately it was used: what will want its room again."""
        return self._live and self._live * exp(min(0.0, self._live_at - now) / LIVE_TAU_S)

    def resize(self, gpu_tokens: int | None, host_tokens: int | None) -> None:
        """Take the engine's word on its capacities; None leaves what is known."""
        if gpu_tokens == self.gpu_tokens and host_tokens == self.host_tokens:
            return  # as most reports have it
        self.gpu_tokens = gpu_tokens if gpu_tokens and gpu_tokens > 0 else self.gpu_tokens
        self.host_tokens = host_tokens if host_tokens and host_tokens > 0 else self.host_tokens
        self._measure()

    def _measure(self) -> None:
        believed = HEADROOM * self.scale
        self._gpu_limit = (self.gpu_tokens or DEFAULT_TOKENS) * believed
        self.capacity = max(self.gpu_tokens or DEFAULT_TOKENS, self.host_tokens or 0) * believed
        self._evict()

    def touch(self, home: Home, tokens: int, counted: int, now: float) -> None:
        """The conversation was used here and has `tokens` resident now, `counted` of them its own."""
        if now >= self._live_at + LIVE_GRID_S:
            self._live = self.live(now)
            self._live_at = now
        gpu = self._gpu
        if home in gpu:
            gpu.move_to_end(home)
            self._gpu_sum += counted - home.counted
        else:
            if home in self._host:
                del self._host[home]
                self._host_sum -= home.counted
            gpu[home] = None
            self._gpu_sum += counted
        self._live = max(0.0, self._live - self._still_live(home)) + counted
        home._live, home._live_at = float(counted), self._live_at
        home.tokens = home.whole = tokens
        home.counted = counted
        home.resident = True
        home.on_host = False
        home.last_use = now
        if self._gpu_sum > self._gpu_limit or self._gpu_sum + self._host_sum > self.capacity:
            self._evict()

    def _still_live(self, home: Home) -> float:
        """What the home adds to the live sum."""
        passed = self._live_at - home._live_at
        return home._live * exp(-passed / LIVE_TAU_S) if passed > 0.0 else home._live

    def forget(self, home: Home) -> None:
        """The conversation is not here any more, or nobody remembers it."""
        self._drop(home)
        home.resident = False
        home.tokens = 0

    def clear(self) -> None:
        """The cache is empty: the engine restarted, or was flushed."""
        for home in (*self._gpu, *self._host):
            home.resident = False
            home.tokens = home.whole = 0
            home._live = 0.0
        self._gpu.clear()
        self._host.clear()
        self._gpu_sum = self._host_sum = 0
        self._live = 0.0

    def correct(self, home: Home, used_at: float, believed: int, cached: int, whole: int) -> None:
        """Learn from an answer: `believed` tokens were thought resident, `cached` were, of `whole` that once were.

        `used_at` is when the conversation was last used here before. Too few cached means a smaller cache only if what
        was used since could have pushed it out; else the client rewrote its history.
        """
        if cached > believed + DEAD_BAND_TOKENS and whole > believed + DEAD_BAND_TOKENS:
            self._rescale(GROW)
        elif cached < believed - DEAD_BAND_TOKENS and self._used_since(used_at, home) > 0.5 * self.capacity:
            self._rescale(1.0 / SHRINK)

    def _used_since(self, at: float, but: Home) -> int:
        """Tokens of what was used at `at` or later, one home left out: the distance in the LRU."""
        tokens = 0
        for tier in (self._gpu, self._host):
            for home in reversed(tier):
                if home.last_use < at:
                    return tokens
                if home is not but:
                    tokens += home.counted
        return tokens

    def _rescale(self, step: float) -> None:
        self.corrections += 1
        self.scale = min(max(self.scale * step, SCALE_BOUNDS[0]), SCALE_BOUNDS[1])
        self._measure()

    def _drop(self, home: Home) -> None:
        """Take it out of its tier and of the live sum."""
        if home in self._gpu:
            del self._gpu[home]
            self._gpu_sum -= home.counted
        elif home in self._host:
            del self._host[home]
            self._host_sum -= home.counted
        if home._live:
            self._live = max(0.0, self._live - self._still_live(home))
            home._live = 0.0

    def _evict(self) -> None:
        while self._gpu_sum > self._gpu_limit and len(self._gpu) > 1:
            home, _ = self._gpu.popitem(last=False)
            self._gpu_sum -= home.counted
            home.on_host = True
            self._host[home] = None
            self._host_sum += home.counted
        while self._host and self._gpu_sum + self._host_sum > self.capacity:
            home = next(iter(self._host))
            over = int(self._gpu_sum + self._host_sum - self.capacity) + 1
            if home.counted > over:  # its end goes, its beginning stays
                home.counted -= over
                home.tokens -= over
                self._host_sum -= over
            else:
                self.forget(home)
