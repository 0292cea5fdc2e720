"""The state machine: a fleet, its open leases, the session directory, and one policy."""

from __future__ import annotations

from math import inf

from policies.directory import Directory
from policies.events import (
    CacheCleared,
    Finished,
    FirstToken,
    LoadReported,
    ReplicaAdded,
    ReplicaChanged,
    ReplicaRemoved,
    Routed,
)
from policies.policy import Policy
from policies.types import Choice, Load, Outcome, Phase, Replica, Request, Resident, State, Usage


class NoReplica(Exception):
    """No replica can take the request. `reason`: `no_replicas`, `all_draining`, `all_ejected`, `all_failed`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Lease:
    """One request's place on one replica, from choice to end. Finished exactly once, whatever happens."""

    __slots__ = ("_balancer", "_pending_tokens", "begun", "choice", "finished", "opened_at", "replica", "request")

    def __init__(self, balancer: Balancer, request: Request, choice: Choice, now: float) -> None:
        self._balancer = balancer
        self.request = request
        self.choice = choice
        self.replica = replica = choice.replica
        self.opened_at = now
        self.begun = False
        self.finished = False
        self._pending_tokens = pending = max(0, request.prompt_tokens - choice.resident_tokens)
        replica.in_flight += 1
        replica.served += 1
        balancer.leases += 1
        replica.last_lease = balancer.leases
        replica.prefill_tokens += pending

    def first_token(self, now: float) -> None:
        """The answer has begun: its prompt is prefilled. A second call does nothing."""
        if self.begun or self.finished:
            return
        self.begun = True
        self.replica.prefill_tokens -= self._pending_tokens
        self._pending_tokens = 0
        balancer = self._balancer
        if balancer.told:
            balancer.policy.observe(FirstToken(now, self.request, self.replica, now - self.opened_at))

    def finish(self, outcome: Outcome, usage: Usage | None, now: float) -> None:
        """Give the place back. A second call does nothing."""
        if self.finished:
            return
        self.finished = True
        self.replica.in_flight -= 1
        self.replica.prefill_tokens -= self._pending_tokens
        self._balancer._finished(self, outcome, usage, now)


class Balancer:
    """Told what happened, asked what to do. Every `now` is seconds of the driver's monotonic clock."""

    def __init__(self, policy: Policy, directory: Directory | None = None) -> None:
        self.policy = policy
        self.told = _listens(policy)
        """Whether the policy learns from requests at all: an event nobody hears is not made."""
        self.directory = directory if directory is not None else Directory()
        self.replicas: dict[str, Replica] = {}
        self.leases = 0
        """Leases ever opened."""
        self._ready: tuple[Replica, ...] = ()

    @property
    def ready(self) -> tuple[Replica, ...]:
        """Replicas that may be sent requests, in order of id."""
        return self._ready

    # The fleet

    def join(self, replica: Replica, now: float) -> None:
        """Add a replica. One under the same id is replaced: the old object keeps only its open leases.

        Raises ValueError when its weight is negative or not a finite number.
        """
        if not 0.0 <= replica.weight < inf:
            raise ValueError(f"replica {replica.id}: weight must be 0 or more and finite, got {replica.weight}")
        if replica.id in self.replicas:
            self.leave(replica.id, now)
        replica.since = now
        self.replicas[replica.id] = replica
        self._refresh()
        self.policy.observe(ReplicaAdded(now, replica))

    def leave(self, replica_id: str, now: float) -> Replica:
        """Remove a replica; its open leases end in their own time. Raises KeyError when it is unknown."""
        replica = self.replicas.pop(replica_id)
        self._refresh()
        self.policy.observe(ReplicaRemoved(now, replica))
        return replica

    def set_state(self, replica: Replica, state: State, now: float) -> None:
        was = replica.state
        replica.state = state
        if was is state or not self._present(replica):
            return
        self._refresh()
        self.policy.observe(ReplicaChanged(now, replica, was))

    def report(self, replica: Replica, load: Load, now: float) -> None:
        """Take an engine's word on its load. Own requests are noted with it, so that others' can be told apart."""
        load.own_running = replica.in_flight
        load.own_tokens = replica.prefill_tokens
        replica.load = load
        if self._present(replica):
            self.policy.observe(LoadReported(now, replica, load))

    def cache_cleared(self, replica: Replica, now: float) -> None:
        """Its KV cache is empty: nothing placed there until now is resident any more."""
        replica.since = now
        if self._present(replica):
            self.policy.observe(CacheCleared(now, replica))

    def _present(self, replica: Replica) -> bool:
        """Whether it is in the fleet: probes and polls may end after their replica has left."""
        return self.replicas.get(replica.id) is replica

    def _refresh(self) -> None:
        self._ready = tuple(r for _, r in sorted(self.replicas.items()) if r.state is State.READY)

    # Requests

    def acquire(self, request: Request, now: float) -> Lease:
        """Choose a replica and open a lease on it. Raises NoReplica when there is none to choose."""
        candidates = self._candidates(request)
        self._look_up(request, now)
        choice = self.policy.pick(request, candidates, now)
        lease = Lease(self, request, choice, now)
        if request.key is not None:
            own = request.residents[0] if request.residents else None  # this conversation's home comes first
            kept = own.tokens if own and own.same_conversation and own.replica is choice.replica else 0
            self.directory.place(request.key, request.fingerprint, choice.replica.id, kept, now)
        if self.told:
            self.policy.observe(Routed(now, request, choice))
        return lease

    def explain(self, request: Request, now: float) -> Choice:
        """What `acquire` would choose, with nothing changed. Raises NoReplica likewise."""
        candidates = self._candidates(request)
        self._look_up(request, now)
        return self.policy.pick(request, candidates, now)

    def switch(self, policy: Policy, now: float) -> None:
        """Put another policy in charge. Homes, leases and loads stay; it is told of the fleet as it stands."""
        for replica in self.replicas.values():
            policy.observe(ReplicaAdded(now, replica))
        self.policy = policy
        self.told = _listens(policy)

    def _candidates(self, request: Request) -> tuple[Replica, ...]:
        candidates = self._ready
        if request.failed:
            candidates = tuple(r for r in candidates if r not in request.failed)
            if not candidates and self._ready:
                raise NoReplica("all_failed")
        if not candidates:
            raise NoReplica(self._why_none())
        return candidates

    def _why_none(self) -> str:
        states = {r.state for r in self.replicas.values()}
        if not states:
            return "no_replicas"
        return "all_draining" if states == {State.DRAINING} else "all_ejected"

    def _look_up(self, request: Request, now: float) -> None:
        """Fill in which candidates hold the session's KV."""
        request.residents = ()
        request.known = False
        if request.key is None:
            return
        homes = self.directory.homes(request.key, now)
        if not homes:
            return
        request.known = True
        residents: list[Resident] = []
        for home in homes:
            replica = self.replicas.get(home.replica_id)
            if (
                replica is None
                or replica.state is not State.READY
                or home.last_use < replica.since
                or replica in request.failed
            ):
                continue
            same = home.fingerprint == request.fingerprint
            resident = Resident(replica, home.tokens, same)
            if same:
                residents.insert(0, resident)
            else:
                residents.append(resident)
        request.residents = tuple(residents)

    def _finished(self, lease: Lease, outcome: Outcome, usage: Usage | None, now: float) -> None:
        request = lease.request
        present = self._present(lease.replica)  # not one that returned, empty, under its id
        if present and request.key is not None:
            tokens = 0
            if usage is not None and usage.prompt_tokens:
                tokens = usage.prompt_tokens + (usage.completion_tokens or 0)
            elif outcome.phase is Phase.BODY:  # not reported, but it answered: it holds the prompt
                tokens = request.prompt_tokens
            if tokens > 0:
                self.directory.grow(request.key, request.fingerprint, lease.replica.id, tokens, now)
        if self.told:
            self.policy.observe(Finished(now, request, lease.replica, outcome, usage))


def _listens(policy: Policy) -> bool:
    return type(policy).observe is not Policy.observe
