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
    needs = Needs.SESSION

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
        least = min(waits)
        limit = least + self.tie_s
        if max(waits) <= limit:
            near = candidates
        else:
            near = [r for r, wait in zip(candidates, waits, strict=True) if wait <= limit]
        if request.key is None:
            return Choice(min(near, key=lambda r: (expected_wait(r, now), r.last_lease)), Reason.NO_SESSION, least)
        replica = near[0] if len(near) == 1 else hashing.rendezvous(request.key, near)
        wait = expected_wait(replica, now)
        return Choice(replica, Reason.HOME_LOST if request.known else Reason.NEW, wait)

    def snapshot(self) -> Snapshot:
        return Snapshot(self.name, {"tie_s": self.tie_s})
