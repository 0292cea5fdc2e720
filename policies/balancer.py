"""The state machine: a fleet, its open leases, the session directory, and one policy."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from math import inf
from operator import attrgetter

from policies import cost, lag, settling
from policies.directory import Directory
from policies.events import (
    CacheCleared,
    Event,
    Finished,
    FirstToken,
    LoadReported,
    ReplicaAdded,
    ReplicaChanged,
    ReplicaRemoved,
    Routed,
    RoutedElsewhere,
)
from policies.lease import Lease
from policies.lookup import Found, look_up, unsure
from policies.policy import Policy
from policies.pool import Counts, Pool, alike
from policies.regret import Regret
from policies.responses import PREFIX, Responses
from policies.sharing import Note, hear, stale
from policies.types import (
    OUTCOMES,
    TRIALS,
    Cause,
    Choice,
    Load,
    Outcome,
    Phase,
    Reason,
    Replica,
    Request,
    State,
    Usage,
)


class NoReplica(Exception):
    """No replica of its pool can take the request.

    `reason`: `no_replicas`, `all_draining`, `all_ejected`, `all_failed`.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Balancer:
    """Told what happened, asked what to do. Every `now` is seconds of the driver's monotonic clock."""

    def __init__(self, policy: Policy, directory: Directory | None = None) -> None:
        self.policy = policy
        self.shadow: Policy | None = None
        """Another policy, asked beside the one in charge and never obeyed; see `run_shadow`."""
        self.shadow_fault = ""
        """What ended the last shadow, when it ended by a fault of its own."""
        self.disagreements: dict[tuple[Reason, Reason, bool], int] = {}
        """Choices by the reason of the policy in charge, the shadow's, and whether both chose the same replica."""
        self.told = False
        """Whether a policy learns from requests at all: an event nobody hears is not made."""
        self.directory = directory if directory is not None else Directory()
        self.responses = Responses(self.directory.max_sessions, self.directory.idle_s)
        self.replicas: dict[str, Replica] = {}
        self.leases = 0
        """Leases ever opened."""
        self.in_flight = 0
        """Leases open now, of replicas that have left, too. Only Lease changes it."""
        self.in_flight_tokens = 0
        """Prompt tokens of the same leases. Only Lease changes it."""
        self.pending = 0
        """Those of the open leases that await their first token. Only Lease changes it."""
        self.prefilled_s = 0.0
        """Expected prefill seconds of all leases that ever had their first token. Only Lease changes it."""
        self.regret = Regret()
        self.on_home: Callable[[Lease], None] | None = None
        """Called when a lease has changed what is known of a conversation's homes: as it is opened, and as it ends."""
        self._ordered: list[Replica] = []
        """All of them in order of id: kept so, as to sort thousands at each join would hold everything up."""
        self._ready: tuple[Replica, ...] = ()
        self._ready_default: tuple[Replica, ...] = ()
        """Those of the default pool: all, where there is no other."""
        self._pools: dict[str, Pool] = {}
        """Those that have a name, and a replica."""
        self._finishing: frozenset[Replica] = frozenset()
        self._judge_at = 0.0
        self._listening()

    @property
    def ready(self) -> tuple[Replica, ...]:
        """Replicas of all pools that may be sent requests, in order of id. The same object until the fleet changes."""
        return self._ready

    def ready_in(self, pool: str) -> tuple[Replica, ...]:
        """Those of one pool. The same object until that changes."""
        if not pool:
            return self._ready_default
        found = self._pools.get(pool)
        return () if found is None else found.ready

    def within(self, pool: str) -> Iterable[Replica]:
        """All replicas of one pool."""
        replicas = self.replicas.values()
        return replicas if self._alone(pool) else [r for r in replicas if r.pool == pool]

    def _alone(self, pool: str) -> bool:
        """Whether all that there is is of that pool: it is the default one, and no other has a replica."""
        return not self._pools and not pool

    def under_way(self, pool: str) -> tuple[int, int]:
        """Requests in flight in one pool, and their prompt tokens."""
        if self._alone(pool):
            return self.in_flight, self.in_flight_tokens
        counts = self.counts(pool)
        return counts.in_flight, counts.in_flight_tokens

    def counts(self, pool: str) -> Counts:
        """What one pool has done and has under way. What left it is not in them, where there are several."""
        if self._alone(pool):
            regretted = sum(self.regret.elsewhere.values()) + sum(self.regret.evicted.values())
            return Counts(self.leases, self.in_flight, self.in_flight_tokens, self.pending, self.prefilled_s, regretted)
        each = [
            (r.served, r.in_flight, r.in_flight_tokens, r.pending, r.prefilled_s, r.regretted_tokens)
            for r in self.within(pool)
        ]
        return Counts(*map(sum, zip(*each, strict=True))) if each else Counts(0, 0, 0, 0, 0.0, 0)

    def policy_in(self, pool: str) -> Policy:
        """The one in charge there; that of the default pool where there is no such pool."""
        found = self._pools.get(pool)
        return self.policy if found is None else found.policy

    # The fleet

    def join(self, replica: Replica, now: float) -> None:
        """Add a replica. One under the same id is replaced: the old object keeps only its open leases.

        Raises ValueError when its weight is negative or not a finite number.
        """
        _check_weight(replica.id, replica.weight)
        if replica.id in self.replicas:
            self.leave(replica.id, now)
        replica.since = replica.started = now
        replica.present = True
        self.replicas[replica.id] = replica
        insort(self._ordered, replica, key=_id)
        if replica.pool:
            pool = self._pools.get(replica.pool)
            if pool is None:
                pool = self._pools[replica.pool] = Pool(self.policy, self.shadow)
            pool.size += 1
        self._refresh(replica.pool)
        self._tell(ReplicaAdded(now, replica), replica)

    def leave(self, replica_id: str, now: float) -> Replica:
        """Remove a replica; its open leases end in their own time. Raises KeyError when it is unknown."""
        replica = self.replicas.pop(replica_id)
        del self._ordered[bisect_left(self._ordered, replica_id, key=_id)]
        replica.present = False
        replica.cache.clear()
        self._refresh(replica.pool)
        self._tell(ReplicaRemoved(now, replica), replica)
        if replica.pool:
            pool = self._pools[replica.pool]
            pool.size -= 1
            if not pool.size:
                del self._pools[replica.pool]
        return replica

    def set_state(self, replica: Replica, state: State, now: float) -> None:
        was = replica.state
        replica.state = state
        if was is state or not replica.present:
            return
        if state is State.READY:
            replica.started = now
        self._refresh(replica.pool)
        self._tell(ReplicaChanged(now, replica, was), replica)

    def set_weight(self, replica: Replica, weight: float, now: float) -> None:
        """Give a replica another share of traffic. Raises ValueError as `join` does."""
        _check_weight(replica.id, weight)
        replica.weight = weight
        if replica.present:
            self._refresh(replica.pool)  # policies know a fleet by the tuple of its candidates
            self._tell(ReplicaChanged(now, replica, replica.state), replica)

    def report(self, replica: Replica, load: Load, now: float) -> None:
        """Take an engine's word on its load, its capacities and its speed.

        Own requests are noted with it, so that others' can be told apart. As the report and our count are not of
        one instant, only what two reports in a row see beyond our own, and beyond what other routers tell of theirs,
        is taken for that of somebody else.
        """
        load.own_running = replica.in_flight
        load.own_tokens = replica.prefill_tokens
        running = max(0, (load.running or 0) + (load.waiting or 0) - load.own_running - replica.routers[0])
        tokens = max(0, (load.waiting_tokens or 0) - load.own_tokens - replica.routers[1])
        last = replica.last_foreign or (running, tokens)
        replica.last_foreign = (running, tokens)
        replica.foreign = (min(running, last[0]), min(tokens, last[1]))
        replica.load = load
        self._add_others(replica, load.at)
        replica.cache.resize(load.capacity_tokens, load.host_capacity_tokens)
        if load.prefill_tokens_per_s is not None:
            replica.speed.tell(load.prefill_tokens_per_s)
        if replica.present:
            self._tell(LoadReported(now, replica, load), replica)

    def hear_load(self, replica: Replica, running: int, tokens: int, pending_s: float, now: float) -> None:
        """Take the other routers' word on what they have there: requests in flight, and of those that await their first
        token the unprefilled tokens and the expected prefill seconds.

        Theirs and ours stand in one queue: what they add comes behind what is known, what they have done is gone.
        """
        added_s = pending_s - replica.routers_s
        replica.routers, replica.routers_s, replica.routers_at = (running, tokens), pending_s, now
        if added_s > 0.0:
            replica.prefill_ends = max(now, replica.prefill_ends) + added_s
        elif added_s < 0.0:
            replica.prefill_ends = cost.prefills_end(replica, now)
        if not cost.fresh(replica, now):
            replica.foreign = (0, 0)
        self._add_others(replica, now)
        if replica.present:
            if added_s > 0.0:
                self._tell(RoutedElsewhere(now, replica, added_s), replica)
            self._tell(LoadReported(now, replica, None), replica)

    def _add_others(self, replica: Replica, at: float) -> None:
        replica.others_running = replica.routers[0] + replica.foreign[0]
        replica.others_tokens = replica.foreign[1]
        replica.others_at = max(at, replica.others_at)

    def hear(self, note: Note, now: float) -> None:
        """Take another router's word for a conversation's home, or anyone's for a response's issuer.

        Nothing happens for a replica that is not known.
        """
        replica = self.replicas.get(note.replica)
        if replica is None:
            return
        if not note.key.startswith(PREFIX):
            hear(self.directory, replica, note, now)
        elif not stale(note, replica):
            self.responses.put(note.key, replica.id, now)

    def cache_cleared(self, replica: Replica, now: float) -> None:
        """Its KV cache is empty: nothing placed there until now is resident any more."""
        replica.since = now
        replica.cache.clear()
        if replica.present:
            self._tell(CacheCleared(now, replica), replica)

    def _refresh(self, pool: str) -> None:
        """A replica of that pool has changed: the other pools' candidates stay the very same."""
        self._ready = ready = tuple([r for r in self._ordered if _takes(r)])
        self._finishing = frozenset([r for r in self._ordered if r.state is State.FINISHING])
        if not self._pools:
            self._ready_default = ready
        elif not pool:
            self._ready_default = tuple([r for r in ready if not r.pool])
        else:
            self._pools[pool].ready = tuple([r for r in ready if r.pool == pool])

    def _tried(self, replica: Replica, trials: int, now: float) -> None:
        """So many requests more are on trial there; at the bound it is no candidate."""
        took = _takes(replica)
        replica.trials += trials
        if replica.present and took is not _takes(replica):
            self._refresh(replica.pool)
            self._tell(ReplicaChanged(now, replica, replica.state), replica)

    # Policies

    def switch(self, policy: Policy, now: float) -> None:
        """Put another policy in charge. Homes, leases and loads stay; it is told of the fleet as it stands."""
        self._introduce(policy, "", now)
        self.policy = policy
        for name, pool in self._pools.items():
            pool.policy = alike(policy)
            self._introduce(pool.policy, name, now)
        self._listening()

    def run_shadow(self, policy: Policy | None, now: float) -> None:
        """Ask another policy beside the one in charge for every request, and count where they differ. None ends it.

        It hears what happened, not what it would have done: homes and loads are those of the policy in charge.
        """
        if policy is not None:
            self._introduce(policy, "", now)
        self.shadow = policy
        for name, pool in self._pools.items():
            pool.shadow = None if policy is None else alike(policy)
            if pool.shadow is not None:
                self._introduce(pool.shadow, name, now)
        self.shadow_fault = ""
        self.disagreements.clear()
        self._listening()

    def _introduce(self, policy: Policy, pool: str, now: float) -> None:
        for replica in self.within(pool):
            policy.observe(ReplicaAdded(now, replica))

    def _listening(self) -> None:
        self.told = any(p is not None and type(p).observe is not Policy.observe for p in (self.policy, self.shadow))

    def _tell(self, event: Event, replica: Replica) -> None:
        """Of a replica: whoever chooses in its pool."""
        policy, shadow = self.policy, self.shadow
        if replica.pool:
            pool = self._pools.get(replica.pool)
            if pool is None:
                return  # all of it have left, and this one has ended its last requests
            policy, shadow = pool.policy, pool.shadow
        policy.observe(event)
        if shadow is not None:
            try:
                shadow.observe(event)
            except Exception as error:
                self._drop_shadow(error)

    # Requests

    def acquire(self, request: Request, now: float) -> Lease:
        """Choose a replica and open a lease on it. Raises NoReplica when there is none to choose."""
        found = look_up(self.directory, request, now)
        choice = self._bound(request, found, now) if self._finishing or request.response is not None else None
        if choice is None:
            candidates = self._candidates(request)
            policy, shadow = self.policy, self.shadow
            if request.pool:
                pool = self._pools[request.pool]
                policy, shadow = pool.policy, pool.shadow
            choice = self._as_proposed(request, now) or policy.pick(request, candidates, now)
            choice = self._complete(choice, request, found)
            if shadow is not None:
                self._compare(choice, shadow, request, candidates, now)
        lease = Lease(self, request, choice, now)
        try:
            if request.issuer is not None and request.response is not None:
                self.responses.put(request.response, request.issuer.id, now)
            if request.key is not None and request.turn:
                settling.place(lease, self.directory, found, now)
                if self.on_home is not None:
                    self.on_home(lease)
            if self.told:
                self._tell(Routed(now, request, choice), choice.replica)
            if choice.replica.state is State.HALF_OPEN:
                lease.trial = True
                self._tried(choice.replica, 1, now)
        except Exception:  # whoever asked has no lease to finish
            lease.finish(OUTCOMES[Cause.ROUTER, Phase.QUEUE], None, now)
            raise
        return lease

    def explain(self, request: Request, now: float) -> Choice:
        """What `acquire` would choose and why, with nothing changed. Raises NoReplica likewise."""
        return self._ask(self.policy_in(request.pool).explain, request, now)

    def propose(self, request: Request, now: float) -> Choice:
        """As `explain`, without the candidates that were not chosen."""
        return self._ask(self.policy_in(request.pool).pick, request, now)

    def _ask(
        self, choose: Callable[[Request, Sequence[Replica], float], Choice], request: Request, now: float
    ) -> Choice:
        found = look_up(self.directory, request, now)
        choice = self._bound(request, found, now) if self._finishing or request.response is not None else None
        if choice is None:
            choice = self._complete(choose(request, self._candidates(request), now), request, found)
        return choice

    def _as_proposed(self, request: Request, now: float) -> Choice | None:
        """What was proposed for a session of which nothing is known yet, if it may still be sent there."""
        given = request.proposed
        if given is None or request.known or given.replica in request.failed:
            return None
        if not (given.replica.present and _takes(given.replica)):
            return None
        return Choice(given.replica, given.reason, cost.expected_wait(given.replica, now))

    def _bound(self, request: Request, found: Found, now: float) -> Choice | None:
        """The choice that is no policy's: of a request that only one replica can answer, or that stays."""
        if request.response is not None:
            request.issuer = issuer = self.issuer(request, now)
            if issuer is not None:
                request.pool = issuer.pool  # who asks for what it has need not know in which pool that is
                return self._complete(Choice(issuer, Reason.HOME, cost.expected_wait(issuer, now)), request, found)
        return self._stay(request, found, now) if self._finishing else None

    def issuer(self, request: Request, now: float) -> Replica | None:
        """The replica that has the response that the request names, if it may be sent the request; else None.

        One that drains gets no turn any more, but who asks for what it has, or cancels it, asks for nothing new. Nor
        does a turn leave its pool: another's replicas do not serve its model.
        """
        issuer = None if request.response is None else self.responses.issuer(request.response, now)
        replica = None if issuer is None else self.replicas.get(issuer)
        if replica is None or replica in request.failed or (request.turn and replica.pool != request.pool):
            return None
        serves = replica.state in _SERVE or (replica.state is State.DRAINING and not request.turn)
        return replica if serves else None

    def _stay(self, request: Request, found: Found, now: float) -> Choice | None:
        """The choice of a conversation that is resident only on replicas that finish their sessions: it is no policy's.

        Else None: what begins, in a known session too, is placed among those that are ready.
        """
        if found.branch is None or request.residents:
            return None
        stays = [
            held
            for replica, held in found.holders.items()
            if replica in self._finishing and replica.pool == request.pool and replica not in request.failed
        ]
        if not stays:
            return None
        resident = max(stays, key=lambda r: (r.own, r.tokens))
        request.residents = (resident,)
        request.lost = False
        choice = Choice(resident.replica, Reason.HOME, cost.expected_wait(resident.replica, now))
        return self._complete(choice, request, found)

    def stays(self, request: Request, now: float) -> Replica | None:
        """The replica that finishes its sessions, this one's among them, and may be sent the request; else None."""
        if not self._finishing:
            return None
        choice = self._stay(request, look_up(self.directory, request, now), now)
        return None if choice is None else choice.replica

    def _compare(
        self, choice: Choice, shadow: Policy, request: Request, candidates: tuple[Replica, ...], now: float
    ) -> None:
        """Count whether the shadow agrees. A fault of its own ends it, and no request."""
        try:
            other = shadow.pick(request, candidates, now)
        except Exception as error:
            self._drop_shadow(error)
            return
        pair = (choice.reason, other.reason, choice.replica is other.replica)
        self.disagreements[pair] = self.disagreements.get(pair, 0) + 1

    def _drop_shadow(self, error: Exception) -> None:
        self.shadow = None
        for pool in self._pools.values():
            pool.shadow = None
        self.shadow_fault = repr(error)
        self._listening()

    def unsure(self, key: bytes | None, blocks: Sequence[int], now: float) -> bool:
        """Whether a request's fingerprint is needed to tell which conversation it belongs to."""
        return unsure(self.directory, key, blocks, now)

    def _candidates(self, request: Request) -> tuple[Replica, ...]:
        candidates = ready = self.ready_in(request.pool) if request.pool else self._ready_default
        if request.failed:
            failed = set(request.failed)  # while caps are reached there may be as many as replicas
            candidates = tuple(r for r in candidates if r not in failed)
            if not candidates and ready:
                raise NoReplica("all_failed")
        if not candidates:
            raise NoReplica(self._why_none(request.pool))
        return candidates

    def _why_none(self, pool: str) -> str:
        states = {r.state for r in self.within(pool)}
        if not states:
            return "no_replicas"
        return "all_draining" if states <= {State.DRAINING, State.FINISHING} else "all_ejected"

    def _complete(self, choice: Choice, request: Request, found: Found) -> Choice:
        """Say of the choice what its policy left open."""
        if not choice.resident_tokens and not choice.prefill_s:
            resident = found.holders.get(choice.replica)
            if resident is not None:
                choice.resident_tokens = min(resident.tokens, max(0, request.prompt_tokens))
            choice.prefill_s = cost.prefill(choice.replica, max(0, request.prompt_tokens), resident)
        return choice

    def _judge(self, now: float) -> None:
        """Which replicas are slow, compared with all of their pool."""
        self._judge_at = now + lag.JUDGED_EVERY_S
        for pool in ("", *self._pools):
            for replica in lag.judge(self.within(pool), now):
                self._tell(ReplicaChanged(now, replica, replica.state), replica)

    # Told by leases

    def begun(self, lease: Lease, now: float) -> None:
        """A lease's answer has begun."""
        if self.told:
            self._tell(
                FirstToken(now, lease.request, lease.replica, now - lease.opened_at, lease.choice), lease.replica
            )

    def ended(self, lease: Lease, outcome: Outcome, usage: Usage | None, now: float) -> None:
        """A lease is finished: learn from it."""
        request, replica = lease.request, lease.replica
        if lease.trial:
            self._tried(replica, -1, now)
        settling.compare(lease, usage)
        if now >= self._judge_at:
            self._judge(now)
        if usage is not None and usage.prompt_tokens:
            settling.learn(lease, usage, usage.prompt_tokens, now)
            if lease.home is not None and usage.cached_tokens is not None and replica.reports_cached:
                self.regret.add(lease, usage.prompt_tokens, usage.cached_tokens)
        if lease.home is not None and replica.present:
            settling.settle(lease, self.directory, usage, now)
            if self.on_home is not None:
                self.on_home(lease)
        if self.told:
            self._tell(Finished(now, request, replica, outcome, usage, lease.choice, lease.first_token_at), replica)


_id = attrgetter("id")

_SERVE = (State.READY, State.FINISHING, State.HALF_OPEN)
"""States in which a replica is sent what only it can answer."""


def _takes(replica: Replica) -> bool:
    """Whether it may be sent a request now."""
    return replica.state is State.READY or (replica.state is State.HALF_OPEN and replica.trials < TRIALS)


def _check_weight(replica_id: str, weight: float) -> None:
    if not 0.0 <= weight < inf:
        raise ValueError(f"replica {replica_id}: weight must be 0 or more and finite, got {weight}")
