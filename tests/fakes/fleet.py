"""A Balancer with replicas in it, and the values that tests of the core need again and again."""

from __future__ import annotations

from policies.balancer import Balancer, Lease
from policies.directory import Directory
from policies.policy import Policy
from policies.types import Cause, Outcome, Phase, Replica, Request, Usage

DONE = Outcome(Cause.DONE, Phase.BODY)
CLIENT_LEFT = Outcome(Cause.CLIENT, Phase.BODY)
REFUSED = Outcome(Cause.UPSTREAM, Phase.CONNECT)


def fleet(policy: Policy, ids: str = "abc", directory: Directory | None = None) -> Balancer:
    """A Balancer whose replicas, one for each letter of `ids`, joined at 0 seconds."""
    balancer = Balancer(policy, directory)
    for replica_id in ids:
        balancer.join(Replica(replica_id), 0.0)
    return balancer


def turn(balancer: Balancer, request: Request, now: float, prompt: int = 1000, completion: int = 100) -> Lease:
    """One complete turn: chosen, answered within the second, and its usage reported."""
    lease = balancer.acquire(request, now)
    lease.first_token(now + 0.5)
    lease.finish(DONE, Usage(prompt, 0, completion), now + 1.0)
    return lease
