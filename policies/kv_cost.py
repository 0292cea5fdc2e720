"""The least sum of blocks to prefill and blocks in decoding; after NVIDIA Dynamo's KV router."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import exp, inf
from typing import Any

from policies.events import Event, Finished, ReplicaRemoved, Routed
from policies.least_loaded import fewest_in_flight
from policies.policy import Policy
from policies.prefix_index import BLOCK_TOKENS, PrefixIndex, raw_tokens, shares
from policies.scoring import believing, draw, shortlist, weighted
from policies.types import Candidate, Choice, Needs, Reason, Replica, Request, Snapshot


@dataclass(frozen=True, slots=True)
class KvCostConfig:
    """Parameters of `kv_cost`: Dynamo's names and defaults."""

    overlap_score_credit: float = 1.0
    """Blocks taken off the prefill for each block of the prompt believed to be cached. 0: caches do not count."""
    overlap_score_credit_decay: float = 0.0
    """How quickly that credit falls with the prefill a replica has pending beyond the least: at 1, one prompt of this
    size more halves it."""
    prefill_load_scale: float = 1.0
    """Weight of a block to prefill against one in decoding. Its older name is `overlap_score_weight`."""
    decode_active_request_weight: float = 0.0
    """Blocks that each request in flight counts for beside its own."""
    router_temperature: float = 0.0
    """0: the least cost. Above, by lot with softmax weights of the costs over their range; the higher the evener."""
    router_ttl_secs: float = 120.0
    """Seconds after its last use for which a block is believed to be cached."""
    router_max_tree_size: int = 1_048_576
    """Blocks remembered over all replicas; the least recently used go first."""
    block_size: int = 16
    """Tokens in a block of the cost, the engine's page; the unit of what is shown, and of the weight of a request."""
    seed: int = 0
    """Of the draws: the same seed and the same requests give the same choices."""

    def __post_init__(self) -> None:
        for name in (
            "overlap_score_credit",
            "overlap_score_credit_decay",
            "prefill_load_scale",
            "decode_active_request_weight",
            "router_temperature",
        ):
            value = getattr(self, name)
            if not 0.0 <= value < inf:
                raise ValueError(f"{name} must be 0 or more and finite, got {value}")
        if not 0.0 < self.router_ttl_secs < inf:
            raise ValueError(f"router_ttl_secs must be more than 0 seconds and finite, got {self.router_ttl_secs}")
        if not self.router_max_tree_size >= 1:
            raise ValueError(f"router_max_tree_size must be 1 block or more, got {self.router_max_tree_size}")
        if not self.block_size >= 1:
            raise ValueError(f"block_size must be 1 token or more, got {self.block_size}")


class _Active:
    """The prompts in flight on one replica. Those that begin alike share blocks, as in the engine's cache."""

    __slots__ = ("_blocks", "_leases", "_rest")

    def __init__(self) -> None:
        self._leases: dict[int, tuple[Request, tuple[int, ...], int]] = {}
        """By identity of the request: itself, its blocks, and its tokens outside any."""
        self._blocks: dict[int, int] = {}
        """Requests that hold each block."""
        self._rest = 0

    def __len__(self) -> int:
        """Requests in flight."""
        return len(self._leases)

    @property
    def tokens(self) -> int:
        return len(self._blocks) * BLOCK_TOKENS + self._rest

    def additional(self, blocks: Sequence[int], raw: int) -> int:
        """Tokens that a prompt of `raw` tokens would add."""
        held = self._blocks
        if not held or not blocks:
            return raw
        low, high = 0, len(blocks)
        while low < high:  # who holds a block holds those before it
            middle = (low + high) // 2
            if blocks[middle] in held:
                low = middle + 1
            else:
                high = middle
        return raw - low * BLOCK_TOKENS

    def add(self, request: Request) -> None:
        self.remove(request)
        blocks, rest = request.blocks, raw_tokens(request) - len(request.blocks) * BLOCK_TOKENS
        self._leases[id(request)] = (request, blocks, rest)
        self._rest += rest
        for block in blocks:
            self._blocks[block] = self._blocks.get(block, 0) + 1

    def remove(self, request: Request) -> None:
        """Does nothing for a request that is not there: it was routed before this policy was in charge."""
        _, blocks, rest = self._leases.pop(id(request), (request, (), 0))
        self._rest -= rest
        for block in blocks:
            left = self._blocks[block] - 1
            if left:
                self._blocks[block] = left
            else:
                del self._blocks[block]


_IDLE = _Active()

TERMS = ("prefill", "decode", "requests")
"""Parts of a cost."""


class KvCost(Policy):
    """As Dynamo's KV router without engine events. The cost of a replica, in blocks, is

        prefill_load_scale * max(pending + prompt - overlap_score_credit * cached, 0)
        + decoding + decode_active_request_weight * requests

    where `pending` is prefill sent there before, `cached` what of this prompt was sent there lately, and `decoding` the
    prompts in flight there with this one, blocks that several share counted once. It is divided by the replica's
    weight. Equal costs are settled by lot.
    """

    name = "kv_cost"
    needs = Needs.BLOCKS
    Config = KvCostConfig
    config: KvCostConfig

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self._seed = str(self.config.seed)
        self._draws = 0
        self._active: dict[Replica, _Active] = {}
        self._index = PrefixIndex(
            max_blocks=self.config.router_max_tree_size,
            ttl_s=self.config.router_ttl_secs,
            max_entries=self.config.router_max_tree_size,
        )

    def pick(self, request: Request, candidates: Sequence[Replica], now: float) -> Choice:
        usable = weighted(candidates)
        held = shares(self._index, request, usable, now)
        if request.key is None and not request.blocks:
            chosen, reason = usable.index(fewest_in_flight(usable)), Reason.NO_SESSION
        else:
            chosen, reason = self._settle([sum(terms) for terms in self._terms(request, usable, held)]), Reason.SCORE
        return believing(Choice(usable[chosen], reason), request, held[chosen])

    def explain(self, request: Request, candidates: Sequence[Replica], now: float) -> Choice:
        choice = self.pick(request, candidates, now)
        usable = weighted(candidates)
        weighed = [
            Candidate(replica, sum(terms), dict(zip(TERMS, terms, strict=True)))
            for replica, terms in zip(
                usable, self._terms(request, usable, shares(self._index, request, usable, now)), strict=True
            )
        ]
        choice.candidates, choice.unit = shortlist(weighed, choice.replica), "blocks"
        return choice

    def observe(self, event: Event) -> None:
        self._index.observe(event)
        kind = type(event)
        if kind is Routed:
            assert isinstance(event, Routed)
            self._draws += 1
            self._active.setdefault(event.choice.replica, _Active()).add(event.request)
        elif kind is Finished:
            assert isinstance(event, Finished)
            if (active := self._active.get(event.replica)) is not None:
                active.remove(event.request)
        elif kind is ReplicaRemoved:
            assert isinstance(event, ReplicaRemoved)
            self._active.pop(event.replica, None)

    def snapshot(self) -> Snapshot:
        snapshot = super().snapshot()
        in_flight = sum(len(active) for active in self._active.values())
        snapshot.state = {"blocks": len(self._index), "requests": in_flight}
        return snapshot

    def _terms(
        self, request: Request, usable: Sequence[Replica], held: Sequence[float]
    ) -> list[tuple[float, float, float]]:
        """For each replica its cost in parts, as TERMS names them."""
        config = self.config
        raw = raw_tokens(request)
        prompt = request.prompt_tokens if request.prompt_tokens > 0 else raw
        least = min(r.prefill_tokens for r in usable)
        found: list[tuple[float, float, float]] = []
        for replica, share in zip(usable, held, strict=True):
            credit = config.overlap_score_credit
            if config.overlap_score_credit_decay and prompt:
                credit /= 1.0 + config.overlap_score_credit_decay * (replica.prefill_tokens - least) / prompt
            prefill = max(replica.prefill_tokens + prompt - credit * share * prompt, 0.0)
            active = self._active.get(replica, _IDLE)
            decode = active.tokens + active.additional(request.blocks, raw)
            weight = replica.weight if replica.weight > 0.0 else 1.0
            block = config.block_size * weight
            requests = config.decode_active_request_weight * replica.in_flight / weight
            found.append((config.prefill_load_scale * prefill / block, decode / block, requests))
        return found

    def _settle(self, costs: Sequence[float]) -> int:
        """Which to take."""
        lowest, spread = min(costs), max(costs) - min(costs)
        temperature = self.config.router_temperature
        if temperature == 0.0 or spread == 0.0:
            ties = [i for i, cost in enumerate(costs) if cost == lowest]
            return ties[int(draw(self._draws, self._seed) * len(ties))] if len(ties) > 1 else ties[0]
        # exp of a large negative number is 0, so the lowest always remains.
        odds = list(accumulate(exp((lowest - cost) / spread / temperature) for cost in costs))
        return bisect_right(odds, draw(self._draws, self._seed) * odds[-1])
