"""A table of sessions, and fewest sessions for new ones."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from policies import hashing
from policies.events import Event, ReplicaRemoved, Routed
from policies.least_loaded import fewest_in_flight
from policies.policy import Policy
from policies.types import Choice, Needs, Reason, Replica, Request, Snapshot


@dataclass(frozen=True, slots=True)
class StickyConfig:
    """Parameters of `sticky`."""

    session_expiration_s: float = 7200.0
    """Seconds without a request after which a session is no longer counted; vLLM router's
    `VLLM_ROUTER_SLL_SESSION_EXPIRATION_IN_S`."""
    max_sessions: int = 200_000
    """Sessions counted at most; those used least recently are dropped from the count first."""

    def __post_init__(self) -> None:
        if not 0.0 < self.session_expiration_s < inf:
            raise ValueError(
                f"session_expiration_s must be more than 0 seconds and finite, got {self.session_expiration_s}"
            )
        if self.max_sessions < 1:
            raise ValueError(f"max_sessions must be 1 or more, got {self.max_sessions}")


class Sticky(Policy):
    """A session stays on its replica, however loaded; a new one goes where the fewest sessions are for the weight,
    ties by rendezvous order.

    Homes are the Balancer's, so that a switch of policy moves nobody; beside them, sessions are counted as they are
    routed, and those whose KV cache was evicted are sent back to where it was. Requests without a key go to the
    replica with the fewest in flight.
    """

    name = "sticky"
    needs = Needs.SESSION
    Config = StickyConfig

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self._homes: OrderedDict[bytes, tuple[Replica, float]] = OrderedDict()
        """Where a session was last sent and when; the one unused for longest comes first."""
        self._sessions: dict[Replica, set[bytes]] = {}

    def pick(self, request: Request, candidates: Sequence[Replica], now: float) -> Choice:
        if request.key is None:
            return Choice(fewest_in_flight(candidates), Reason.NO_SESSION)
        if request.residents:
            home = request.residents[0]
            return Choice(home.replica, Reason.HOME, resident_tokens=min(home.tokens, request.prompt_tokens))
        last = self._homes.get(request.key)
        if last is not None and last[0] in candidates:
            return Choice(last[0], Reason.HOME)
        return Choice(self._emptiest(request.key, candidates), Reason.HOME_LOST if request.known else Reason.NEW)

    def observe(self, event: Event) -> None:
        if type(event) is Routed:
            if event.request.key is not None:
                self._count(event.request.key, event.choice.replica, event.at)
        elif type(event) is ReplicaRemoved:
            for key in self._sessions.pop(event.replica, ()):
                del self._homes[key]

    def snapshot(self) -> Snapshot:
        snapshot = super().snapshot()
        snapshot.state["sessions"] = {r.id: len(keys) for r, keys in self._sessions.items()}
        return snapshot

    def _emptiest(self, key: bytes, candidates: Sequence[Replica]) -> Replica:
        weighty = [r for r in candidates if r.weight > 0.0]
        if weighty:
            shares = [len(self._sessions.get(r, ())) / r.weight for r in weighty]
        else:
            weighty, shares = list(candidates), [len(self._sessions.get(r, ())) for r in candidates]
        least = min(shares)
        return hashing.rendezvous(key, [r for r, share in zip(weighty, shares, strict=True) if share == least])

    def _count(self, key: bytes, replica: Replica, now: float) -> None:
        if key in self._homes:
            self._forget(key)
        self._homes[key] = replica, now
        self._sessions.setdefault(replica, set()).add(key)
        oldest, (_, used) = next(iter(self._homes.items()))
        while len(self._homes) > self.config.max_sessions or now - used > self.config.session_expiration_s:
            self._forget(oldest)
            oldest, (_, used) = next(iter(self._homes.items()))

    def _forget(self, key: bytes) -> None:
        replica, _ = self._homes.pop(key)
        sessions = self._sessions[replica]
        sessions.discard(key)
        if not sessions:
            del self._sessions[replica]
