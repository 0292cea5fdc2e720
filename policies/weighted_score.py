"""The highest weighted sum of scores; after llm-d's default blend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from policies.cost import fresh
from policies.events import Event, Routed
from policies.least_loaded import fewest_in_flight
from policies.policy import Policy
from policies.prefix_index import BLOCK_TOKENS, PrefixIndex, shares
from policies.scoring import believing, draw, shortlist, weighted
from policies.types import Candidate, Choice, Needs, Reason, Replica, Request, Snapshot

BLOCK_SIZE_TOKENS = 16
"""Tokens in one of llm-d's blocks, by which `lru_capacity_per_server` counts."""

SCORERS = ("queue-scorer", "kv-cache-utilization-scorer", "prefix-cache-scorer")
"""llm-d's names of what is summed."""


@dataclass(frozen=True, slots=True)
class WeightedScoreConfig:
    """Parameters of `weighted_score`: weights and defaults of llm-d's chart, under its scorers' names."""

    queue_scorer: float = 2.0
    """Weight of the queue: 1 for the shortest, 0 for the longest, in between in proportion; 1 for all when equal."""
    kv_cache_utilization_scorer: float = 2.0
    """Weight of the free part of the KV cache, 0 to 1."""
    prefix_cache_scorer: float = 3.0
    """Weight of the part of the prompt that is believed to be cached, 0 to 1."""
    lru_capacity_per_server: int = 31_250
    """Blocks of 16 tokens remembered for a replica that does not report how many tokens fit its KV cache."""
    seed: int = 0
    """Of the draws among equals: the same seed and the same requests give the same choices."""

    def __post_init__(self) -> None:
        for name in ("queue_scorer", "kv_cache_utilization_scorer", "prefix_cache_scorer"):
            value = getattr(self, name)
            if not 0.0 <= value < inf:
                raise ValueError(f"{name} must be a weight of 0 or more and finite, got {value}")
        if not self.lru_capacity_per_server >= 1:
            raise ValueError(f"lru_capacity_per_server must be 1 block or more, got {self.lru_capacity_per_server}")


class WeightedScore(Policy):
    """As llm-d's router by default: each replica's scores of queue, KV cache and prefix, from 0 to 1 each, times their
    weights; the highest sum wins, and equals are settled by lot (its `max-score-picker`).
    """

    name = "weighted_score"
    needs = Needs.BLOCKS
    Config = WeightedScoreConfig
    config: WeightedScoreConfig

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self._seed = str(self.config.seed)
        self._draws = 0
        self._index = PrefixIndex()

    def pick(self, request: Request, candidates: Sequence[Replica], now: float) -> Choice:
        usable = weighted(candidates)
        held = shares(self._index, request, usable, now)
        if request.key is None and not request.blocks:
            chosen, reason = usable.index(fewest_in_flight(usable)), Reason.NO_SESSION
        else:
            sums = [sum(scores) for scores in self._scores(usable, held, now)]
            highest = max(sums)
            equals = [i for i, value in enumerate(sums) if value == highest]
            chosen, reason = equals[int(draw(self._draws, self._seed) * len(equals))], Reason.SCORE
        return believing(Choice(usable[chosen], reason), request, held[chosen])

    def explain(self, request: Request, candidates: Sequence[Replica], now: float) -> Choice:
        choice = self.pick(request, candidates, now)
        usable = weighted(candidates)
        held = shares(self._index, request, usable, now)
        weighed = [
            # The highest score is the least cost.
            Candidate(replica, -sum(scores), {name: -score for name, score in zip(SCORERS, scores, strict=True)})
            for replica, scores in zip(usable, self._scores(usable, held, now), strict=True)
        ]
        choice.candidates, choice.unit = shortlist(weighed, choice.replica), ""
        return choice

    def observe(self, event: Event) -> None:
        if type(event) is not Routed:
            self._index.observe(event)
            return
        self._draws += 1
        replica = event.choice.replica
        load = replica.load
        # HiCache writes through: what is in either tier is found again.
        fits = max(load.capacity_tokens or 0, load.host_capacity_tokens or 0) if load is not None else 0
        tokens = fits or self.config.lru_capacity_per_server * BLOCK_SIZE_TOKENS
        self._index.insert(replica, event.request.blocks, event.at, max_blocks=tokens // BLOCK_TOKENS)

    def snapshot(self) -> Snapshot:
        snapshot = super().snapshot()
        snapshot.state = {"blocks": len(self._index)}
        return snapshot

    def _scores(self, usable: Sequence[Replica], held: Sequence[float], now: float) -> list[tuple[float, float, float]]:
        """For each replica its weighted scores, in the order of SCORERS."""
        config = self.config
        queues = [_queue(replica, now) for replica in usable]
        longest = max(queues)
        span = longest - min(queues)
        used = [_used(replica, now) for replica in usable]
        fullest = max((part for part in used if part is not None), default=0.0)
        return [
            (
                config.queue_scorer * ((longest - queue) / span if span else 1.0),
                config.kv_cache_utilization_scorer * (1.0 - (fullest if part is None else part)),
                config.prefix_cache_scorer * share,
            )
            for queue, part, share in zip(queues, used, held, strict=True)
        ]


def _queue(replica: Replica, now: float) -> int:
    """Requests waiting in the engine. Not known or known too long ago: our own in flight there, for it may be busy."""
    load = replica.load
    if load is None or load.waiting is None or not fresh(replica, now):
        return replica.in_flight
    return load.waiting


def _used(replica: Replica, now: float) -> float | None:
    """The part of its KV cache that running requests use, or None."""
    load = replica.load
    if load is None or load.used_tokens is None or not load.capacity_tokens or not fresh(replica, now):
        return None
    return min(1.0, max(0.0, load.used_tokens / load.capacity_tokens))
