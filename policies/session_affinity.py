"""A session stays where its KV cache is; others go where they are served soonest."""

from __future__ import annotations

from collections.abc import Sequence

from policies import hashing
from policies.cost import expected_wait
from policies.policy import Policy
from policies.types import Choice, Needs, Reason, Replica, Request, Snapshot


class SessionAffinity(Policy):
    """Home while it is a candidate; else the least expected wait, near-ties by rendezvous order.

    Near-ties are waits within `tie_s` of the least: differences below the noise of load reports must not
    decide, and routers that know nothing must agree.
    """

    name = "session_affinity"
    needs = Needs.SESSION | Needs.FINGERPRINT

    def __init__(self, tie_s: float = 0.15) -> None:
        if not tie_s >= 0:
            raise ValueError(f"tie_s must be 0 seconds or more, got {tie_s}")
        self.tie_s = tie_s

    def pick(self, request: Request, candidates: Sequence[Replica], now: float) -> Choice:
        if request.residents:
            home = request.residents[0]
            resident = min(home.tokens, request.prompt_tokens) if home.same_conversation else 0
            return Choice(home.replica, Reason.HOME, expected_wait(home.replica, now), resident)
        waits = [expected_wait(r, now) for r in candidates]
        limit = min(waits) + self.tie_s
        near = [(r, w) for r, w in zip(candidates, waits, strict=True) if w <= limit]
        if request.key is None:
            replica, wait = min(near, key=lambda rw: (rw[1], rw[0].last_lease))
            return Choice(replica, Reason.NO_SESSION, wait)
        if len(near) == 1:
            replica, wait = near[0]
        else:
            replica = hashing.rendezvous(request.key, [r for r, _ in near])
            wait = expected_wait(replica, now)
        return Choice(replica, Reason.HOME_LOST if request.known else Reason.NEW, wait)

    def snapshot(self) -> Snapshot:
        return Snapshot(self.name, {"tie_s": self.tie_s})
