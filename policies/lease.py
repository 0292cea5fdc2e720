"""One request's place on one replica."""

from __future__ import annotations

from typing import TYPE_CHECKING

from policies import cost
from policies.types import Choice, Outcome, Request, Usage

if TYPE_CHECKING:
    from policies.balancer import Balancer
    from policies.directory import Branch
    from policies.residency import Home


class Lease:
    """From choice to end. Finished exactly once, whatever happens; what a request counts for is given back there."""

    __slots__ = (
        "_added_s",
        "_balancer",
        "_pending_tokens",
        "_prompt_tokens",
        "alone",
        "batch",
        "begun",
        "believed",
        "branch",
        "choice",
        "elsewhere",
        "finished",
        "first_token_at",
        "held_tokens",
        "home",
        "opened_at",
        "prefilled_s",
        "replica",
        "request",
        "slowness",
        "timed",
        "trial",
        "used_at",
        "was_tokens",
        "was_whole",
        "work_s",
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
        self.timed = True
        """Whether its tokens come when the engine makes them: not when the answer comes whole, nor at the pace of a
        slow reader. The driver says so."""
        self.trial = False
        """It began while its replica was on trial. Only the Balancer changes it."""
        self.prefilled_s = 0.0
        """The replica's, when its answer began."""
        # What the Balancer needs again at the end; see `settling.place`.
        self.branch: Branch | None = None
        self.home: Home | None = None
        self.believed = self.elsewhere = self.was_tokens = self.was_whole = 0
        self.used_at = 0.0
        self.slowness = replica.speed.slowness
        """What its choice's seconds were multiplied by."""
        self._prompt_tokens = prompt = request.prompt_tokens if request.prompt_tokens > 0 else 0
        self._pending_tokens = pending = prompt - choice.resident_tokens if prompt > choice.resident_tokens else 0
        replica.in_flight += 1
        replica.in_flight_tokens += prompt
        self.held_tokens = prompt
        """KV tokens by which it takes room of its own; see `share`."""
        replica.held_tokens += prompt
        balancer.in_flight += 1
        balancer.in_flight_tokens += prompt
        replica.served += 1
        balancer.leases += 1
        replica.last_lease = balancer.leases
        replica.prefill_tokens += pending
        overhead_s = replica.speed.overhead_s
        self.work_s = choice.prefill_s - overhead_s if choice.prefill_s > overhead_s else 0.0
        """Expected seconds of its prefill in a pass that it shares."""
        # What waits is computed in one pass: only the first of them adds the pass's overhead.
        self._added_s = choice.prefill_s if replica.pending == 0 else self.work_s
        replica.pending += 1
        balancer.pending += 1
        replica.pending_s += self.work_s
        replica.prefill_ends = (replica.prefill_ends if replica.prefill_ends > now else now) + self._added_s

    def share(self, tokens: int) -> None:
        """So much of its prompt is held by other leases there, too: it takes room once."""
        shared = min(tokens, self.held_tokens)
        self.held_tokens -= shared
        self.replica.held_tokens -= shared

    def first_token(self, now: float) -> None:
        """The answer has begun: its prompt is prefilled. A second call does nothing."""
        if self.begun or self.finished:
            return
        self.begun = True
        self.first_token_at = now
        replica = self.replica
        self.batch = replica.in_flight
        replica.prefilled_s += self._added_s
        self._balancer.prefilled_s += self._added_s
        self.prefilled_s = replica.prefilled_s
        self._give_back()
        # Prefills are served first come, first served: what is left is what else was sent and has not begun.
        replica.prefill_ends = cost.prefills_end(replica, now)
        self._balancer.begun(self, now)

    def finish(self, outcome: Outcome, usage: Usage | None, now: float) -> None:
        """Give the place back. A second call does nothing."""
        if self.finished:
            return
        self.finished = True
        replica, balancer = self.replica, self._balancer
        replica.in_flight -= 1
        replica.in_flight_tokens -= self._prompt_tokens
        replica.held_tokens -= self.held_tokens
        if self.first_token_at is not None and self.timed:
            replica.speed.observe_answer(now - self.first_token_at)
        balancer.in_flight -= 1
        balancer.in_flight_tokens -= self._prompt_tokens
        if self.branch is not None:
            self.branch.open -= 1
        if not self.begun:
            if replica.pending > 1:
                replica.prefill_ends -= self.work_s
            else:
                replica.prefill_ends = min(replica.prefill_ends, now + cost.routers_s(replica, now))
            self._give_back()
        balancer.ended(self, outcome, usage, now)

    def _give_back(self) -> None:
        """It awaits its first token no more."""
        replica = self.replica
        replica.prefill_tokens -= self._pending_tokens
        replica.pending -= 1
        self._balancer.pending -= 1
        # Sums of seconds are rounded; with nothing pending they are nothing.
        replica.pending_s = max(0.0, replica.pending_s - self.work_s) if replica.pending else 0.0
