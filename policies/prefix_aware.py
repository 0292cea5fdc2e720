"""To the replica that was sent the longest part of the prompt, unless load is uneven; after SGLang's router."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from policies.events import Event
from policies.least_loaded import fewest_in_flight
from policies.policy import Policy
from policies.prefix_index import BLOCK_TOKENS, PrefixIndex, raw_tokens, shares
from policies.scoring import believing, weighted
from policies.types import Choice, Needs, Reason, Replica, Request, Snapshot

BLOCK_CHARACTERS = 4096
"""Bytes of raw body in a block: what SGLang's router would count as characters."""


@dataclass(frozen=True, slots=True)
class PrefixAwareConfig:
    """Parameters of `prefix_aware`: SGLang's names and the defaults of its router 0.3.2."""

    cache_threshold: float = 0.3
    """Part of the prompt, 0 to 1, that must be matched by more than this for the match to count."""
    balance_abs_threshold: int = 64
    """Requests in flight by which the replicas with the most and the fewest must differ for load to be uneven."""
    balance_rel_threshold: float = 1.5
    """How many times the fewest requests in flight the most must be above, as well, for load to be uneven."""
    max_tree_size: int = 67_108_864
    """Characters of prompts (here: bytes of bodies) remembered for one replica; the least recently used go first."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.cache_threshold <= 1.0:
            raise ValueError(f"cache_threshold must be from 0 to 1, got {self.cache_threshold}")
        if not self.balance_abs_threshold >= 0:
            raise ValueError(f"balance_abs_threshold must be 0 requests or more, got {self.balance_abs_threshold}")
        if not 1.0 <= self.balance_rel_threshold < inf:
            raise ValueError(f"balance_rel_threshold must be 1 or more and finite, got {self.balance_rel_threshold}")
        if not self.max_tree_size >= BLOCK_CHARACTERS:
            raise ValueError(f"max_tree_size must be {BLOCK_CHARACTERS} (one block) or more, got {self.max_tree_size}")


class PrefixAware(Policy):
    """As SGLang's `cache_aware`. While load is even, the replica that holds the longest part of the prompt, if that is
    more than `cache_threshold` of it; the one that had it first when several do. Otherwise the one with the fewest
    requests in flight. Load is in requests for the replica's weight.
    """

    name = "prefix_aware"
    needs = Needs.BLOCKS
    Config = PrefixAwareConfig
    config: PrefixAwareConfig

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self._index = PrefixIndex(max_blocks=self.config.max_tree_size // BLOCK_CHARACTERS)

    def pick(self, request: Request, candidates: Sequence[Replica], now: float) -> Choice:
        usable = weighted(candidates)
        holder, share = self._holder(request, usable, now)
        if share <= self.config.cache_threshold:
            holder = None
        if holder is not None and not self._uneven(usable):
            return believing(Choice(holder, Reason.PREFIX), request, share)
        least = fewest_in_flight(usable)
        if holder is least:
            reason = Reason.PREFIX
        elif holder is not None:
            reason = Reason.SPILLED
        else:
            reason = Reason.LEAST_LOADED if request.blocks or request.key is not None else Reason.NO_SESSION
        return believing(Choice(least, reason), request, shares(self._index, request, (least,), now)[0])

    def observe(self, event: Event) -> None:
        self._index.observe(event)

    def snapshot(self) -> Snapshot:
        snapshot = super().snapshot()
        snapshot.state = {"blocks": len(self._index)}
        return snapshot

    def _holder(self, request: Request, usable: Sequence[Replica], now: float) -> tuple[Replica | None, float]:
        """The replica that holds most of the prompt, and which part."""
        if request.blocks:
            holder, matched = self._index.longest(usable, request.blocks, now)
            return holder, matched * BLOCK_TOKENS / raw_tokens(request)
        held = shares(self._index, request, usable, now)
        most = max(held)
        return (usable[held.index(most)], most) if most > 0.0 else (None, 0.0)

    def _uneven(self, usable: Sequence[Replica]) -> bool:
        loads = [r.in_flight / r.weight if r.weight > 0.0 else float(r.in_flight) for r in usable]
        most, fewest = max(loads), min(loads)
        config = self.config
        return most - fewest > config.balance_abs_threshold and most > fewest * config.balance_rel_threshold
