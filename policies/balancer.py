"""The state machine: a fleet, its open leases, the session directory, and one policy."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from policies import cost
from policies.directory import MAX_HOMES, Branch, Directory, condense, links, shared
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
)
from policies.lease import Lease
from policies.policy import Policy
from policies.regret import Regret
from policies.residency import Home
from policies.types import Choice, Load, Outcome, Phase, Reason, Replica, Request, Resident, State, Usage

_UNKNOWN = 1 << 62
"""Tokens of a prompt of which nothing is known: no less than any home holds."""


class NoReplica(Exception):
    """No replica can take the request. `reason`: `no_replicas`, `all_draining`, `all_ejected`, `all_failed`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class _Found:
    """What the directory knows of a request."""

    __slots__ = ("branch", "branches", "chain", "holders")

    def __init__(self) -> None:
        self.branches: Sequence[Branch] = ()
        """Of its conversation."""
        self.branch: Branch | None = None
        """The one it continues, or forks from when that one is under way."""
        self.chain = b""
        self.holders: dict[Replica, Resident] = {}
        """Also those that are no candidates."""


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
        self.replicas: dict[str, Replica] = {}
        self.leases = 0
        """Leases ever opened."""
        self.regret = Regret()
        self._ready: tuple[Replica, ...] = ()
        self._listening()

    @property
    def ready(self) -> tuple[Replica, ...]:
        """Replicas that may be sent requests, in order of id. The same object until the fleet changes."""
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
        self._tell(ReplicaAdded(now, replica))

    def leave(self, replica_id: str, now: float) -> Replica:
        """Remove a replica; its open leases end in their own time. Raises KeyError when it is unknown."""
        replica = self.replicas.pop(replica_id)
        replica.cache.clear()
        self._refresh()
        self._tell(ReplicaRemoved(now, replica))
        return replica

    def set_state(self, replica: Replica, state: State, now: float) -> None:
        was = replica.state
        replica.state = state
        if was is state or not self._present(replica):
            return
        self._refresh()
        self._tell(ReplicaChanged(now, replica, was))

    def report(self, replica: Replica, load: Load, now: float) -> None:
        """Take an engine's word on its load, its capacities and its speed.

        Own requests are noted with it, so that others' can be told apart. As the report and our count are not of
        one instant, only what two reports in a row see beyond our own is taken for others'.
        """
        load.own_running = replica.in_flight
        load.own_tokens = replica.prefill_tokens
        running = max(0, (load.running or 0) + (load.waiting or 0) - load.own_running)
        tokens = max(0, (load.waiting_tokens or 0) - load.own_tokens)
        last = replica.last_others or (running, tokens)
        replica.last_others = (running, tokens)
        replica.others_running, replica.others_tokens = min(running, last[0]), min(tokens, last[1])
        replica.load = load
        replica.cache.resize(load.capacity_tokens, load.host_capacity_tokens)
        if load.prefill_tokens_per_s is not None:
            replica.speed.tell(load.prefill_tokens_per_s)
        if self._present(replica):
            self._tell(LoadReported(now, replica, load))

    def cache_cleared(self, replica: Replica, now: float) -> None:
        """Its KV cache is empty: nothing placed there until now is resident any more."""
        replica.since = now
        replica.cache.clear()
        if self._present(replica):
            self._tell(CacheCleared(now, replica))

    def _present(self, replica: Replica) -> bool:
        """Whether it is in the fleet: probes and polls may end after their replica has left."""
        return self.replicas.get(replica.id) is replica

    def _refresh(self) -> None:
        self._ready = tuple(r for _, r in sorted(self.replicas.items()) if r.state is State.READY)

    # Policies

    def switch(self, policy: Policy, now: float) -> None:
        """Put another policy in charge. Homes, leases and loads stay; it is told of the fleet as it stands."""
        self._introduce(policy, now)
        self.policy = policy
        self._listening()

    def run_shadow(self, policy: Policy | None, now: float) -> None:
        """Ask another policy beside the one in charge for every request, and count where they differ. None ends it.

        It hears what happened, not what it would have done: homes and loads are those of the policy in charge.
        """
        if policy is not None:
            self._introduce(policy, now)
        self.shadow = policy
        self.shadow_fault = ""
        self.disagreements.clear()
        self._listening()

    def _introduce(self, policy: Policy, now: float) -> None:
        for replica in self.replicas.values():
            policy.observe(ReplicaAdded(now, replica))

    def _listening(self) -> None:
        self.told = any(p is not None and type(p).observe is not Policy.observe for p in (self.policy, self.shadow))

    def _tell(self, event: Event) -> None:
        self.policy.observe(event)
        if self.shadow is not None:
            try:
                self.shadow.observe(event)
            except Exception as error:
                self._drop_shadow(error)

    # Requests

    def acquire(self, request: Request, now: float) -> Lease:
        """Choose a replica and open a lease on it. Raises NoReplica when there is none to choose."""
        candidates = self._candidates(request)
        found = self._look_up(request, now)
        choice = self._complete(self.policy.pick(request, candidates, now), request, found)
        if self.shadow is not None:
            self._compare(choice, self.shadow, request, candidates, now)
        lease = Lease(self, request, choice, now)
        if request.key is not None and request.turn:
            self._place(lease, found, now)
        if self.told:
            self._tell(Routed(now, request, choice))
        return lease

    def explain(self, request: Request, now: float) -> Choice:
        """What `acquire` would choose and why, with nothing changed. Raises NoReplica likewise."""
        candidates = self._candidates(request)
        found = self._look_up(request, now)
        return self._complete(self.policy.explain(request, candidates, now), request, found)

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
        self.shadow_fault = repr(error)
        self._listening()

    def unsure(self, key: bytes | None, blocks: Sequence[int], now: float) -> bool:
        """Whether a request's fingerprint is needed to tell which conversation it belongs to.

        Not when its session has one branch, idle, that the request visibly continues: then its body need not be parsed.
        """
        if key is None:
            return True
        branches = self.directory.branches(key, now)
        if len(branches) != 1 or branches[0].open:
            return True
        known, chain = branches[0].chain, condense(blocks)
        if not known and not chain:
            return False  # too short for a link, and so for a mistake to cost anything
        return 2 * shared(known, chain) <= links(known)

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

    def _look_up(self, request: Request, now: float) -> _Found:
        """Fill in what the directory knows of the request."""
        request.residents = ()
        request.known = request.lost = request.concurrent = False
        request.last_home = None
        request.once_tokens = 0
        if request.estimate_tokens < 0:
            request.estimate_tokens = request.prompt_tokens
        request.prompt_tokens = request.estimate_tokens
        found = _Found()
        if request.key is None:
            return found
        branches = self.directory.branches(request.key, now)
        request.known = bool(branches)
        found.chain = condense(request.blocks)
        found.branches = _of_conversation(branches, request.fingerprint)
        found.branch = branch = _continued(found.branches, found.chain)
        if branch is not None:
            request.concurrent = branch.open > 0
            request.prompt_tokens = int(request.estimate_tokens * branch.ratio)
        elif branches:
            if not any(other.open for other in branches):
                homes = [home.replica for other in branches for home in other.homes]
                request.last_home = next((replica for replica in homes if self._usable(replica, request)), None)
                request.lost = bool(homes) and request.last_home is None
        elif request.parent is not None and request.fingerprint:
            # A subagent may begin with its parent's conversation.
            found.branches = _of_conversation(self.directory.branches(request.parent, now), request.fingerprint)
        self._hold(request, found)
        return found

    def _hold(self, request: Request, found: _Found) -> None:
        """Which replicas hold how much of the prompt."""
        prompt = request.prompt_tokens if request.prompt_tokens > 0 else _UNKNOWN
        holders = found.holders
        residents: list[Resident] = []
        for branch in found.branches:
            own = branch is found.branch
            limit = prompt
            if found.chain and branch.chain and (request.concurrent or not own):  # it forks off there
                limit = prompt * shared(branch.chain, found.chain) // links(found.chain)
            for home in branch.homes:
                request.once_tokens = max(request.once_tokens, min(home.whole, limit))
                tokens = min(home.tokens, limit)
                replica = home.replica
                usable = self._usable(replica, request)
                if not home.whole or not usable:  # cleared, or out of reach
                    request.lost = True
                if tokens <= 0 or not home.resident:
                    continue
                resident = Resident(replica, tokens, 0 if home.on_host and replica.cache.host_tokens else tokens, own)
                better = holders.get(replica)
                if better is not None:
                    if (own, tokens) <= (better.own, better.tokens):
                        continue
                    if usable:
                        residents.remove(better)
                holders[replica] = resident
                if usable:
                    residents.append(resident)
        if len(residents) > 1:
            residents.sort(key=lambda resident: not resident.own)
        request.residents = tuple(residents)

    def _usable(self, replica: Replica, request: Request) -> bool:
        return replica.state is State.READY and self._present(replica) and replica not in request.failed

    def _complete(self, choice: Choice, request: Request, found: _Found) -> Choice:
        """Say of the choice what its policy left open."""
        if not choice.resident_tokens and not choice.prefill_s:
            resident = found.holders.get(choice.replica)
            if resident is not None:
                choice.resident_tokens = min(resident.tokens, max(0, request.prompt_tokens))
            choice.prefill_s = cost.prefill(choice.replica, max(0, request.prompt_tokens), resident)
        return choice

    def _place(self, lease: Lease, found: _Found, now: float) -> None:
        """Note in the directory and in the replica's shadow that the prompt is being computed there."""
        request, replica = lease.request, lease.replica
        assert request.key is not None
        branch = found.branch
        if branch is None or request.concurrent:
            fork = Branch(request.key, request.fingerprint, found.chain, now, fork=branch is not None)
            if branch is not None:
                fork.ratio, fork.fingerprint = branch.ratio, request.fingerprint or branch.fingerprint
            branch = fork
        else:
            branch.chain = found.chain or branch.chain
            branch.fingerprint = branch.fingerprint or request.fingerprint
        branch.open += 1
        self.directory.put(branch, now)
        lease.branch = branch
        holder = found.holders.get(replica)
        lease.believed = holder.tokens if holder is not None else 0
        lease.elsewhere = max((r.tokens for r in found.holders.values() if r.replica is not replica), default=0)
        home = branch.home_on(replica)
        if home is None:
            home = Home(replica, now)
        else:
            branch.homes.remove(home)
        branch.homes.insert(0, home)
        for old in branch.homes[MAX_HOMES:]:
            old.replica.cache.forget(old)
        del branch.homes[MAX_HOMES:]
        lease.home = home
        lease.was_tokens, lease.was_whole = home.tokens, home.whole
        lease.used_at = home.last_use
        tokens = request.prompt_tokens if request.prompt_tokens > 0 else home.tokens
        replica.cache.touch(home, tokens, max(0, tokens - self._doubled(branch, home, found)), now)

    def _doubled(self, branch: Branch, home: Home, found: _Found) -> int:
        """Tokens of its prompt's beginning that other branches' homes on the same replica take room for already."""
        counted = []
        for other in found.branches:
            if other is not branch and (twin := other.home_on(home.replica)) is not None:
                limit = twin.tokens
                if found.chain and other.chain:
                    limit = limit * shared(other.chain, found.chain) // max(1, links(other.chain))
                counted.append((twin.tokens - twin.counted, limit))
        # Each counts its end. What none of them counts must be counted here: the beginning that all share.
        doubled = 0
        for start, end in sorted(counted):
            if start > doubled:
                break
            doubled = max(doubled, end)
        return doubled

    # Told by leases

    def begun(self, lease: Lease, now: float) -> None:
        """A lease's answer has begun."""
        if self.told:
            self._tell(FirstToken(now, lease.request, lease.replica, now - lease.opened_at, lease.choice))

    def ended(self, lease: Lease, outcome: Outcome, usage: Usage | None, now: float) -> None:
        """A lease is finished: learn from it."""
        request, replica = lease.request, lease.replica
        if usage is not None and usage.prompt_tokens:
            self._learn(lease, usage, usage.prompt_tokens, now)
        if lease.home is not None and lease.branch is not None and self._present(replica):
            self._settle(lease, lease.branch, lease.home, outcome, usage, now)
        if self.told:
            self._tell(Finished(now, request, replica, outcome, usage, lease.choice, lease.first_token_at))

    def _learn(self, lease: Lease, usage: Usage, prompt: int, now: float) -> None:
        """From an answer's usage: speed, capacity, and what was recomputed needlessly."""
        replica, speed = lease.replica, lease.replica.speed
        cached = usage.cached_tokens
        if cached:
            replica.reports_cached = True
        if cached is not None and replica.reports_cached:
            cached = min(cached, prompt)
            if lease.alone and lease.first_token_at is not None:
                speed.observe_prefill(prompt - cached, cached, lease.first_token_at - lease.opened_at)
            if lease.home is not None:
                replica.cache.correct(
                    lease.home, lease.used_at, min(lease.believed, prompt), cached, min(lease.was_whole, prompt)
                )
                self.regret.add(lease, prompt, cached)
        if lease.first_token_at is not None and usage.completion_tokens:
            speed.observe_decode(
                usage.completion_tokens,
                (lease.batch + replica.in_flight + 1) / 2.0,
                replica.prefilled_s - lease.prefilled_s,
                now - lease.first_token_at,
            )

    def _settle(
        self, lease: Lease, branch: Branch, home: Home, outcome: Outcome, usage: Usage | None, now: float
    ) -> None:
        """Note what is resident after a turn."""
        request = lease.request
        if usage is not None and usage.prompt_tokens:
            tokens = usage.prompt_tokens + (usage.completion_tokens or 0)
            if request.estimate_tokens > 0:
                branch.ratio = min(max(usage.prompt_tokens / request.estimate_tokens, 0.1), 10.0)
        elif outcome.phase is Phase.BODY and request.prompt_tokens > 0:  # it answered: it holds the prompt
            tokens = request.prompt_tokens
        else:  # nothing shows that anything was computed
            tokens = lease.was_tokens if lease.opened_at >= lease.replica.since else 0
        if not self.directory.holds(branch):
            lease.replica.cache.forget(home)
        elif tokens > 0:
            counted = max(0, tokens - max(0, home.tokens - home.counted))
            lease.replica.cache.touch(home, tokens, counted, now)
            self.directory.put(branch, now)
        else:
            lease.replica.cache.forget(home)
            if home in branch.homes:
                branch.homes.remove(home)


def _of_conversation(branches: Sequence[Branch], fingerprint: int) -> Sequence[Branch]:
    """The branches whose beginning is the same; where nobody looked, it may be."""
    if not fingerprint:
        return branches
    return [branch for branch in branches if branch.fingerprint in (0, fingerprint)]


def _continued(branches: Sequence[Branch], chain: bytes) -> Branch | None:
    """The branch that shares most with the request; among equals an idle one, the main one, the latest."""
    if len(branches) <= 1:
        return branches[0] if branches else None
    return max(branches, key=lambda branch: (shared(branch.chain, chain), not branch.open, not branch.fork))
