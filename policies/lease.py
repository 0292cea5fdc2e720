"""One request's place on one replica."""

from __future__ import annotations

from typing import TYPE_CHECKING

from policies.types import Choice, Outcome, Request, Usage

if TYPE_CHECKING:
    from policies.balancer import Balancer
    from policies.directory import Branch
    from policies.residency import Home


class Lease:
    """From choice to end. Finished exactly once, whatever happens; what a request counts for is given back there."""

    __slots__ = (
        "_balancer",
        "_pending_tokens",
        "alone",
        "batch",
        "begun",
        "believed",
        "branch",
        "choice",
        "elsewhere",
        "finished",
        "first_token_at",
        "home",
        "opened_at",
        "prefilled_s",
        "replica",
        "request",
        "used_at",
        "was_tokens",
        "was_whole",
    )

    def __init__(self, balancer: Balancer, request: Request, choice: Choice, now: float) -> None:
        self._balancer = balancer
        self.request = request
        self.choice = choice
        self.replica = replica = choice.replica
        self.opened_at = now
        self.begun = False
        self.finished = False
        self.first_token_at: float | None = None
        self.alone = replica.in_flight == 0 and replica.others_running == 0
        """The replica was idle: the time to its first token is its prefill's."""
        self.batch = 0
        """Requests in flight there when its answer began."""
        self.prefilled_s = 0.0
        """The replica's, when its answer began."""
        # What the Balancer needs again at the end; see Balancer._place.
        self.branch: Branch | None = None
        self.home: Home | None = None
        self.believed = self.elsewhere = self.was_tokens = self.was_whole = 0
        self.used_at = 0.0
        self._pending_tokens = pending = max(0, request.prompt_tokens - choice.resident_tokens)
        replica.in_flight += 1
        replica.served += 1
        balancer.leases += 1
        replica.last_lease = balancer.leases
        replica.prefill_tokens += pending
        replica.pending += 1
        replica.pending_s += choice.prefill_s
        replica.prefill_ends = max(now, replica.prefill_ends) + choice.prefill_s

    def first_token(self, now: float) -> None:
        """The answer has begun: its prompt is prefilled. A second call does nothing."""
        if self.begun or self.finished:
            return
        self.begun = True
        self.first_token_at = now
        replica = self.replica
        self.batch = replica.in_flight
        replica.prefilled_s += self.choice.prefill_s
        self.prefilled_s = replica.prefilled_s
        self._give_back()
        # Prefills are served first come, first served: what is left is what else was sent and has not begun.
        replica.prefill_ends = now + replica.pending_s
        self._balancer.begun(self, now)

    def finish(self, outcome: Outcome, usage: Usage | None, now: float) -> None:
        """Give the place back. A second call does nothing."""
        if self.finished:
            return
        self.finished = True
        replica = self.replica
        replica.in_flight -= 1
        if self.branch is not None:
            self.branch.open -= 1
        if not self.begun:
            replica.prefill_ends -= self.choice.prefill_s
            self._give_back()
        self._balancer.ended(self, outcome, usage, now)

    def _give_back(self) -> None:
        """It awaits its first token no more."""
        replica = self.replica
        replica.prefill_tokens -= self._pending_tokens
        replica.pending -= 1
        # Sums of seconds are rounded; with nothing pending they are nothing.
        replica.pending_s = max(0.0, replica.pending_s - self.choice.prefill_s) if replica.pending else 0.0
