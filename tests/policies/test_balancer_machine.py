"""Any order of joins, leaves, returns, leases and their ends, under any policies: the books must balance.

The machine keeps books of its own, from nothing but what it did, and compares them after every step.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import isfinite

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from policies.balancer import Balancer, NoReplica
from policies.directory import MAX_BRANCHES, MAX_HOMES, Branch, Directory
from policies.events import Finished, ReplicaAdded, ReplicaRemoved, Routed
from policies.lease import Lease
from policies.registry import POLICIES, make
from policies.residency import Home
from policies.types import TRIALS, Cause, Choice, Load, Outcome, Phase, Reason, Replica, Request, State, Usage
from tests.fakes.recorder import Recorder

ROOM = 3
"""Sessions the directory holds; fewer than the keys below, so that it is always evicting."""

_ids = st.sampled_from(["a", "b", "c", "d"])
KEYS = (b"u", b"v", b"w", b"x", b"y")
_keys = st.none() | st.sampled_from(KEYS)
_prints = st.integers(0, 2)
_paths = st.none() | st.lists(st.integers(0, 1), max_size=4)
"""A request's place in the tree of its conversation: at each step it goes one of two ways. None: nobody looked."""
_tokens = st.integers(0, 60_000) | st.sampled_from([0, 10**8])
_outcomes = st.builds(Outcome, st.sampled_from(Cause), st.sampled_from(Phase))
_usages = st.none() | st.builds(
    Usage,
    st.none() | st.integers(0, 10**6),
    st.none() | st.integers(0, 10**6),
    st.none() | st.integers(0, 10**6),
)
_figures = st.none() | st.integers(0, 10**6)


def _blocks(fingerprint: int, path: list[int] | None) -> tuple[int, ...]:
    """Chained: what parts once never meets again."""
    if path is None:
        return ()
    blocks, link = [], fingerprint
    for way in path:
        link = 3 * link + 1 + way
        blocks += [link << 8 | n for n in range(4)]
    return tuple(blocks)


@dataclass(eq=False)
class Entry:
    """One open lease in the machine's own books."""

    lease: Lease
    replica: Replica
    pending: int
    begun: bool = False
    trial: bool = False


class BalancerMachine(RuleBasedStateMachine):
    open_leases = Bundle("open_leases")
    closed_leases = Bundle("closed_leases")

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.recorder = Recorder()
        self.balancer = Balancer(self.recorder, Directory(max_sessions=ROOM, idle_s=40.0))
        self.fleet: dict[str, Replica] = {}
        self.gone: list[Replica] = []
        self.served: dict[Replica, int] = {}
        self.entries: list[Entry] = []
        self.finished = self.routed = self.asked = 0

    def _tick(self) -> float:
        self.now += 1.0
        return self.now

    def _heard(self, kind: type[Routed] | type[Finished]) -> int:
        return len(self.recorder.told(kind))

    # The fleet

    @initialize(name=st.sampled_from(sorted(POLICIES)))
    def begin(self, name: str) -> None:
        self.recorder = Recorder(make(name))
        self.balancer.switch(self.recorder, self._tick())

    @rule(replica_id=_ids, weight=st.sampled_from([0.0, 0.5, 1.0, 3.0]), state=st.sampled_from(State))
    def join(self, replica_id: str, weight: float, state: State) -> None:
        """Also the return of a replica under an id that is still, or was once, taken."""
        replica = Replica(replica_id, weight=weight, state=state)
        self.balancer.join(replica, self._tick())
        if (old := self.fleet.pop(replica_id, None)) is not None:
            self.gone.append(old)
        self.fleet[replica_id] = replica
        self.served[replica] = 0

    @rule(replica_id=_ids)
    def join_ready(self, replica_id: str) -> None:
        self.join(replica_id, 1.0, State.READY)

    @rule(replica_id=_ids)
    def leave(self, replica_id: str) -> None:
        if replica_id in self.fleet:
            replica = self.fleet.pop(replica_id)
            assert self.balancer.leave(replica_id, self._tick()) is replica
            self.gone.append(replica)
        else:
            with pytest.raises(KeyError):
                self.balancer.leave(replica_id, self._tick())

    @precondition(lambda self: self.gone)
    @rule(data=st.data())
    def the_same_object_returns(self, data: st.DataObject) -> None:
        replica = data.draw(st.sampled_from(self.gone))
        self.gone.remove(replica)
        if (old := self.fleet.pop(replica.id, None)) is not None:
            self.gone.append(old)
        self.balancer.join(replica, self._tick())
        self.fleet[replica.id] = replica

    @precondition(lambda self: self.fleet)
    @rule(data=st.data(), state=st.sampled_from(State))
    def set_state(self, data: st.DataObject, state: State) -> None:
        self.balancer.set_state(self.fleet[data.draw(st.sampled_from(sorted(self.fleet)))], state, self._tick())

    @precondition(lambda self: self.fleet)
    @rule(data=st.data(), running=_figures, waiting=_figures, tokens=_figures, speed=st.none() | st.floats())
    def report(
        self, data: st.DataObject, running: int | None, waiting: int | None, tokens: int | None, speed: float | None
    ) -> None:
        replica = self.fleet[data.draw(st.sampled_from(sorted(self.fleet)))]
        load = Load(
            at=self.now - data.draw(st.sampled_from([0.0, 5.0, 1000.0])),
            running=running,
            waiting=waiting,
            waiting_tokens=tokens,
            capacity_tokens=data.draw(st.sampled_from([None, 0, 50_000, 200_000])),
            host_capacity_tokens=data.draw(st.sampled_from([None, 300_000])),
            prefill_tokens_per_s=speed,
        )
        self.balancer.report(replica, load, self._tick())
        mine = [e for e in self.entries if e.replica is replica]
        assert (load.own_running, load.own_tokens) == (len(mine), sum(e.pending for e in mine))

    @precondition(lambda self: self.fleet)
    @rule(data=st.data())
    def cache_cleared(self, data: st.DataObject) -> None:
        replica = self.fleet[data.draw(st.sampled_from(sorted(self.fleet)))]
        self.balancer.cache_cleared(replica, self._tick())

    @precondition(lambda self: self.gone)
    @rule(data=st.data(), state=st.sampled_from(State))
    def news_of_the_gone(self, data: st.DataObject, state: State) -> None:
        """A probe or poll that was under way when its replica left."""
        replica = data.draw(st.sampled_from(self.gone))
        self.balancer.set_state(replica, state, self._tick())
        self.balancer.report(replica, Load(at=self.now, running=1), self.now)
        self.balancer.cache_cleared(replica, self.now)

    def _homes(self) -> list[tuple[Branch, Home, int]]:
        return [(b, h, h.tokens) for k in KEYS for b in self.balancer.directory.branches(k, self.now) for h in b.homes]

    @rule(name=st.sampled_from(sorted(POLICIES)))
    def switch(self, name: str) -> None:
        homes = self._homes()
        counted = dict(self.balancer.disagreements)
        self.recorder = Recorder(make(name))
        self.finished = self.routed = 0
        self.balancer.switch(self.recorder, self.now)
        assert homes == self._homes()
        assert self.balancer.disagreements == counted

    @rule(name=st.none() | st.sampled_from(sorted(POLICIES)))
    def run_shadow(self, name: str | None) -> None:
        homes = self._homes()
        self.balancer.run_shadow(None if name is None else make(name), self.now)
        self.asked = 0
        assert homes == self._homes()

    # Requests

    @rule(
        target=open_leases,
        key=_keys,
        parent=_keys,
        fingerprint=_prints,
        prompt=_tokens,
        path=_paths,
        failed=st.sets(_ids, max_size=2),
    )
    def acquire(
        self,
        key: bytes | None,
        parent: bytes | None,
        fingerprint: int,
        prompt: int,
        path: list[int] | None,
        failed: set[str],
    ) -> object:
        tried = tuple(self.fleet[i] for i in sorted(failed) if i in self.fleet)
        blocks = _blocks(fingerprint, path)
        self._ask_whether_unsure(key, blocks)
        return self._acquire(Request(key, parent, fingerprint, prompt, blocks, failed=tried))

    def _ask_whether_unsure(self, key: bytes | None, blocks: tuple[int, ...]) -> None:
        unsure = self.balancer.unsure(key, blocks, self.now)
        assert unsure is self.balancer.unsure(key, blocks, self.now)
        if key is None or len(branches := self.balancer.directory.branches(key, self.now)) != 1:
            assert unsure
        else:
            assert unsure or not branches[0].open

    @rule(target=open_leases, entry=consumes(open_leases))
    def redispatch(self, entry: Entry) -> object:
        """It failed before the first byte: elsewhere, and never again where it failed."""
        self._finish(entry, Outcome(Cause.UPSTREAM, Phase.CONNECT), None)
        entry.lease.request.failed += (entry.replica,)
        return self._acquire(entry.lease.request)

    def _acquire(self, request: Request) -> object:
        now = self._tick()
        ready = self._ready()
        allowed = [r for r in ready if not any(r is f for f in request.failed)]
        stays = self._stays(request, now)
        explained = self._explain(request, now)
        if isinstance(explained, str):
            assert not allowed
            assert explained == self._why_none(ready)
            with pytest.raises(NoReplica, match=explained):
                self.balancer.acquire(request, now)
            return multiple()
        lease = self.balancer.acquire(request, now)
        choice = lease.choice
        assert (lease.replica, choice.reason) == (explained.replica, explained.reason)
        finishes = lease.replica.state is State.FINISHING
        if finishes:
            allowed = stays
            assert choice.reason is Reason.HOME
        assert any(lease.replica is r for r in allowed)
        assert choice.reason in set(Reason)
        assert choice.wait_s >= 0.0
        assert isfinite(choice.wait_s)
        assert isfinite(choice.prefill_s)
        assert 0 <= choice.resident_tokens <= max(0, request.prompt_tokens)
        assert all(any(home.replica is r for r in allowed) for home in request.residents)
        assert len({id(home.replica) for home in request.residents}) == len(request.residents)
        assert [home.own for home in request.residents] == sorted((h.own for h in request.residents), reverse=True)
        assert all(0 <= home.gpu_tokens <= home.tokens for home in request.residents)
        assert request.known or request.parent or not request.residents
        assert (lease.branch is None) is (request.key is None)
        self.asked += self.balancer.shadow is not None and not finishes
        self.served[lease.replica] += 1
        self.routed += 1
        pending = max(0, request.prompt_tokens - choice.resident_tokens)
        entry = Entry(lease, lease.replica, pending, trial=lease.replica.state is State.HALF_OPEN)
        self.entries.append(entry)
        return entry

    def _ready(self) -> list[Replica]:
        """Those that may be sent requests; on trial only so many at once."""
        trials = Counter(entry.replica for entry in self.entries if entry.trial)
        return [
            replica
            for replica in self.fleet.values()
            if replica.state is State.READY or (replica.state is State.HALF_OPEN and trials[replica] < TRIALS)
        ]

    def _explain(self, request: Request, now: float) -> Choice | str:
        """The choice, or why there is none."""
        try:
            return self.balancer.explain(request, now)
        except NoReplica as none:
            return none.reason

    def _stays(self, request: Request, now: float) -> list[Replica]:
        """Replicas that finish their sessions, this one's among them as far as it is remembered and resident there."""
        branches = self.balancer.directory.branches(request.key, now) if request.key is not None else ()
        homes = [home.replica for branch in branches for home in branch.homes if home.resident and home.tokens]
        finishing = [replica for replica in self.fleet.values() if replica.state is State.FINISHING]
        return [r for r in finishing if r in homes and r not in request.failed]

    def _why_none(self, ready: list[Replica]) -> str:
        states = {r.state for r in self.fleet.values()}
        if ready:
            return "all_failed"
        if not states:
            return "no_replicas"
        return "all_draining" if states <= {State.DRAINING, State.FINISHING} else "all_ejected"

    @rule(entry=open_leases)
    def first_token(self, entry: Entry) -> None:
        """Once or more often."""
        entry.lease.first_token(self._tick())
        entry.pending = 0
        entry.begun = True

    @rule(target=closed_leases, entry=consumes(open_leases), outcome=_outcomes, usage=_usages)
    def finish(self, entry: Entry, outcome: Outcome, usage: Usage | None) -> Entry:
        self._finish(entry, outcome, usage)
        return entry

    def _finish(self, entry: Entry, outcome: Outcome, usage: Usage | None) -> None:
        entry.lease.finish(outcome, usage, self._tick())
        assert entry.lease.finished
        self.entries.remove(entry)
        self.finished += 1

    @rule(entry=closed_leases, outcome=_outcomes, usage=_usages)
    def finish_again(self, entry: Entry, outcome: Outcome, usage: Usage | None) -> None:
        entry.lease.first_token(self._tick())
        entry.lease.finish(outcome, usage, self.now)

    @rule(key=st.sampled_from(KEYS))
    def forget(self, key: bytes) -> None:
        self.balancer.directory.forget(key)

    @rule(seconds=st.sampled_from([15.0, 100.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    # The books

    @invariant()
    def load_is_open_leases(self) -> None:
        for replica, served in self.served.items():
            mine = [e for e in self.entries if e.replica is replica]
            assert replica.in_flight == len(mine)
            assert replica.prefill_tokens == sum(e.pending for e in mine)
            assert replica.served == served
            assert replica.pending == sum(not e.begun for e in mine)
            expected = sum(e.lease.work_s for e in mine if not e.begun)
            assert replica.pending_s == pytest.approx(expected, abs=1e-6)
            if all(e.begun for e in mine):
                assert replica.pending_s == 0.0
                assert replica.prefill_ends <= self.now + 1e-6

    @invariant()
    def only_the_ready_are_candidates(self) -> None:
        assert list(self.balancer.ready) == sorted(self._ready(), key=lambda r: r.id)
        assert self.balancer.replicas == self.fleet

    @invariant()
    def the_directory_is_bounded(self) -> None:
        directory = self.balancer.directory
        assert len(directory) <= ROOM
        for key, branches in directory._sessions.items():
            assert 0 < len(branches) <= MAX_BRANCHES
            assert len(set(branches)) == len(branches)
            assert [b.last_use for b in branches] == sorted((b.last_use for b in branches), reverse=True)
            for branch in branches:
                assert branch.key == key
                assert branch.last_use <= self.now
                assert len(branch.homes) <= MAX_HOMES
                assert len({id(h.replica) for h in branch.homes}) == len(branch.homes)
                assert all(h.tokens >= 0 and (h.resident or not h.tokens) for h in branch.homes)

    @invariant()
    def a_branch_is_open_as_long_as_its_leases(self) -> None:
        open_ = Counter(id(e.lease.branch) for e in self.entries if e.lease.branch is not None)
        for branches in self.balancer.directory._sessions.values():
            for branch in branches:
                assert branch.open == open_[id(branch)] <= 1, "what comes meanwhile is a branch of its own"

    @invariant()
    def shadows_hold_what_is_remembered_and_nothing_else(self) -> None:
        """No leaks: each home in a shadow belongs to a remembered branch, and is on that replica."""
        remembered = {h for bs in self.balancer.directory._sessions.values() for b in bs for h in b.homes}
        for replica in self.served:
            cache = replica.cache
            held = [*cache._gpu, *cache._host]
            assert set(held) <= remembered
            assert {h for h in remembered if h.replica is replica and h.resident} == set(held)
            assert all(h.replica is replica and h.resident for h in held)
            assert (cache._gpu_sum, cache._host_sum) == tuple(
                sum(h.counted for h in t) for t in (cache._gpu, cache._host)
            )
            assert all(0 <= h.counted <= h.tokens for h in held)
            assert all(h.on_host is (h in cache._host) for h in held)
            assert 0.0 <= cache.live(self.now) < float("inf")
            if not any(replica is r for r in self.fleet.values()):
                assert not held

    @invariant()
    def the_shadow_is_asked_for_each_lease_once(self) -> None:
        assert sum(self.balancer.disagreements.values()) == self.asked
        assert self.asked == 0 or self.balancer.shadow is not None

    @invariant()
    def the_policy_knows_the_fleet(self) -> None:
        known: list[Replica] = []
        for event in self.recorder.events:
            if isinstance(event, ReplicaAdded):
                assert event.replica not in known
                known.append(event.replica)
            elif isinstance(event, ReplicaRemoved):
                known.remove(event.replica)
        assert set(known) == set(self.fleet.values())

    @invariant()
    def the_policy_hears_of_each_lease_once(self) -> None:
        assert (self._heard(Routed), self._heard(Finished)) == (self.routed, self.finished)

    def teardown(self) -> None:
        """When all has ended, nothing is left on any replica that ever was."""
        for entry in list(self.entries):
            self._finish(entry, Outcome(Cause.ROUTER, Phase.BODY), None)
        assert all(r.in_flight == r.prefill_tokens == r.pending_s == 0 for r in self.served)
        for key in KEYS:
            self.balancer.directory.forget(key)
        assert all(len(r.cache) == r.cache.held_tokens == 0 for r in self.served)


TestBalancer = BalancerMachine.TestCase
TestBalancer.settings = settings(max_examples=150, stateful_step_count=60)
