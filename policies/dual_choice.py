"""Two replicas for each session, and the better of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from policies.cost import expected_wait, prefill, requests
from policies.least_loaded import fewest_in_flight
from policies.policy import Policy
from policies.ring import Rings, check_virtual_nodes, place, weight_of
from policies.types import Candidate, Choice, Needs, Reason, Replica, Request, Resident


@dataclass(frozen=True, slots=True)
class DualChoiceConfig:
    """Parameters of `dual_choice`."""

    ttft_slo_s: float = 5.0
    """Seconds to the first token up to which a session stays where its KV cache is."""
    virtual_nodes: int = 160
    """Points on the ring for each unit of weight."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.ttft_slo_s < inf:
            raise ValueError(f"ttft_slo_s must be 0 seconds or more and finite, got {self.ttft_slo_s}")
        check_virtual_nodes(self.virtual_nodes)


class DualChoice(Policy):
    """Two hashes of the session's key lead to two replicas on the ring. The one that holds more of the prompt is
    taken if it is expected to begin answering within `ttft_slo_s`; else, or if neither holds any, the one that is
    expected to begin first; if both will at once, the one with fewer requests in flight for its weight.

    DualMap (arXiv 2602.06502), without its moving of requests that are already queued: a router has no hold on them.
    Requests without a key go to the replica with the fewest in flight.
    """

    name = "dual_choice"
    needs = Needs.SESSION | Needs.FINGERPRINT
    Config = DualChoiceConfig

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self._rings = Rings(self.config.virtual_nodes)

    def pick(self, request: Request, candidates: Sequence[Replica], now: float) -> Choice:
        if request.key is None:
            return Choice(fewest_in_flight(candidates), Reason.NO_SESSION)
        return self._choose(self._weigh(request.key, request, candidates, now))

    def explain(self, request: Request, candidates: Sequence[Replica], now: float) -> Choice:
        if request.key is None:
            return self.pick(request, candidates, now)
        weighed = self._weigh(request.key, request, candidates, now)
        choice = self._choose(weighed)
        choice.candidates = tuple(
            Candidate(w.replica, w.ttft_s, {"wait": w.wait_s, "prefill": w.prefill_s})
            for w in sorted(weighed, key=lambda w: w.ttft_s)
        )
        return choice

    def _weigh(self, key: bytes, request: Request, candidates: Sequence[Replica], now: float) -> list[_Weighed]:
        """The session's two replicas, or the only one there is."""
        ring = self._rings.of(candidates, request.failed)
        first = ring.owner(place(key))
        second = next((r for r in ring.clockwise(place(key, seed=1)) if r is not first), None)
        residents = {resident.replica: resident for resident in request.residents}
        pair = (first,) if second is None else (first, second)
        return [_Weighed(r, request.prompt_tokens, residents.get(r), now) for r in pair]

    def _choose(self, weighed: list[_Weighed]) -> Choice:
        home = max(weighed, key=lambda w: w.resident_tokens)
        if home.resident_tokens and home.ttft_s <= self.config.ttft_slo_s:
            best = home
        else:
            best = min(weighed, key=lambda w: (w.ttft_s, w.load))
        reason = Reason.HASH
        if home.resident_tokens:
            reason = Reason.HOME if best is home else Reason.MOVED
        return Choice(best.replica, reason, best.wait_s, best.resident_tokens, best.prefill_s)


class _Weighed:
    """One of a session's two replicas."""

    __slots__ = ("load", "prefill_s", "replica", "resident_tokens", "ttft_s", "wait_s")

    def __init__(self, replica: Replica, prompt_tokens: int, resident: Resident | None, now: float) -> None:
        self.replica = replica
        self.resident_tokens = 0 if resident is None else min(resident.tokens, prompt_tokens)
        self.wait_s = expected_wait(replica, now)
        self.prefill_s = prefill(replica, prompt_tokens, resident)
        self.ttft_s = self.wait_s + self.prefill_s
        self.load = requests(replica, now) / weight_of(replica)
