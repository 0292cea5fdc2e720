"""Which replica was sent which beginnings of prompts: a guess at what their KV caches hold.

A prompt is a chain of block hashes, each of them over its block and all before it. So a replica that holds a block
holds those before it, as long as nothing forgets a beginning before its end; and how far a prompt is known there is
found by halving instead of walking.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from policies.events import CacheCleared, Event, ReplicaRemoved, Routed
from policies.types import Replica, Request

BLOCK_TOKENS = 1024
"""Tokens in a block of a prompt, before any correction: 4 KiB of the raw body at 4 bytes a token."""

MAX_ENTRIES = 1 << 20
"""Blocks remembered over all replicas together, each replica's counted: 130 MB by measurement."""


class Stay(NamedTuple):
    """A block's time on a replica. One object for all blocks of a prompt that came and were last used together."""

    first: int
    """Number of the prompt that brought it: among several holders, the lowest had it first."""
    last: float
    """When it was last used, in seconds of the driver's clock."""


class PrefixIndex:
    """For each replica the blocks it was sent, least recently used first, bounded in number and in age.

    Every `now` is seconds of the driver's clock. Looking up changes nothing.
    """

    def __init__(self, max_blocks: int = MAX_ENTRIES, ttl_s: float = inf, max_entries: int = MAX_ENTRIES) -> None:
        """At most `max_blocks` for one replica and `max_entries` for all, of which each has an equal part.

        A block unused for more than `ttl_s` seconds does not count.
        """
        self._max_blocks = max_blocks
        self._max_entries = max_entries
        self._ttl_s = ttl_s
        self._held: dict[Replica, OrderedDict[int, Stay]] = {}
        self._prompts = 0

    def __len__(self) -> int:
        """Blocks remembered, each replica's counted."""
        return sum(map(len, self._held.values()))

    def observe(self, event: Event) -> None:
        """Learn from what happened: where prompts were sent, and which caches were lost."""
        kind = type(event)
        if kind is Routed:
            assert isinstance(event, Routed)
            self.insert(event.choice.replica, event.request.blocks, event.at)
        elif kind is ReplicaRemoved or kind is CacheCleared:
            assert isinstance(event, ReplicaRemoved | CacheCleared)
            self.forget(event.replica)

    def insert(self, replica: Replica, blocks: Sequence[int], now: float, max_blocks: int | None = None) -> None:
        """The replica was sent this prompt. `max_blocks`, when given, bounds what is remembered of this replica."""
        if not blocks:
            return
        held = self._held.get(replica)
        if held is None:
            held = self._held[replica] = OrderedDict()
            share = self._share()
            for others in self._held.values():
                _trim(others, share)
        self._prompts += 1
        capacity = min(self._share(), self._max_blocks if max_blocks is None else max(1, max_blocks))
        fresh = Stay(self._prompts, now)
        horizon = now - self._ttl_s
        known = renewed = fresh
        # From its end to its beginning: so the beginning is always used later than the end, and goes after it.
        for block in reversed(blocks[:capacity]):
            stay = held.get(block)
            if stay is None:
                held[block] = fresh
                continue
            if stay is not known:
                known, renewed = stay, Stay(stay.first, now) if stay.last >= horizon else fresh
            held[block] = renewed
            held.move_to_end(block)
        _trim(held, capacity)
        while next(iter(held.values())).last < horizon:
            held.popitem(last=False)

    def forget(self, replica: Replica) -> None:
        """Its cache is gone."""
        self._held.pop(replica, None)

    def matches(self, replicas: Sequence[Replica], blocks: Sequence[int], now: float) -> list[int]:
        """How many blocks, from the first on, each replica holds."""
        horizon = now - self._ttl_s
        found: list[int] = []
        last = 0
        for replica in replicas:
            held = self._held.get(replica)
            if held:
                # Most replicas hold just what all prompts begin with: likely as much as the one before.
                last = _reach(held, blocks, horizon, last)
                found.append(last)
            else:
                found.append(0)
        return found

    def longest(self, replicas: Sequence[Replica], blocks: Sequence[int], now: float) -> tuple[Replica | None, int]:
        """The replica that holds most of the prompt and how many blocks; among equals, the one that had it first."""
        matched = self.matches(replicas, blocks, now)
        most = max(matched)
        if most == 0:
            return None, 0
        end = blocks[most - 1]
        holders = [replica for replica, reach in zip(replicas, matched, strict=True) if reach == most]
        return min(holders, key=lambda replica: self._held[replica][end].first), most

    def _share(self) -> int:
        return min(self._max_blocks, max(1, self._max_entries // len(self._held)))


def shares(index: PrefixIndex, request: Request, replicas: Sequence[Replica], now: float) -> list[float]:
    """Which part of the prompt, from 0 to 1, each replica is believed to hold.

    Where the body was not looked at, or is shorter than a block: as far as the session directory knows.
    """
    blocks = request.blocks
    if blocks:
        scale = BLOCK_TOKENS / raw_tokens(request)
        return [scale * matched for matched in index.matches(replicas, blocks, now)]
    held = {resident.replica: resident.tokens for resident in request.residents}
    prompt = request.prompt_tokens
    if not held or prompt <= 0:
        return [0.0] * len(replicas)
    return [min(1.0, held.get(replica, 0) / prompt) for replica in replicas]


def raw_tokens(request: Request) -> int:
    """The prompt's size in the measure of its blocks: before the Balancer corrected it for the conversation."""
    estimate = request.prompt_tokens if request.estimate_tokens < 0 else request.estimate_tokens
    return max(estimate, len(request.blocks) * BLOCK_TOKENS)


def _reach(held: OrderedDict[int, Stay], blocks: Sequence[int], horizon: float, guess: int) -> int:
    """How many blocks, from the first on, are held and were used at `horizon` or later; quickest when as guessed."""
    low, high = 0, len(blocks)
    middle = guess - 1 if 0 < guess <= high else 0
    while low < high:
        stay = held.get(blocks[middle])
        if stay is None or stay.last < horizon:
            high = middle
        else:
            low = middle + 1
            if low == guess:
                middle = guess
                continue
        middle = (low + high) // 2
    return low


def _trim(held: OrderedDict[int, Stay], capacity: int) -> None:
    while len(held) > capacity:
        held.popitem(last=False)
