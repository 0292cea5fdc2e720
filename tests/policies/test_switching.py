"""Another policy put in charge, or asked beside it: homes, leases and counters stay, and a shadow changes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest

from policies.balancer import Balancer
from policies.events import Event, Finished, FirstToken, ReplicaAdded, Routed
from policies.lease import Lease
from policies.least_loaded import LeastLoaded
from policies.registry import POLICIES, make
from policies.types import Choice, Reason, Replica, Request, Usage
from tests.fakes.fleet import CLIENT_LEFT, DONE, fleet, turn
from tests.fakes.recorder import Recorder


def _life(balancer: Balancer, first: int, turns: int, open_: list[Lease]) -> list[tuple[str, Reason]]:
    """Turns of ten sessions, some of whose answers are left open; gives the choices."""
    random = Random(first)
    choices: list[tuple[str, Reason]] = []
    for n in range(first, first + turns):
        tokens, now = random.randrange(5_000, 60_000), 3.0 * n
        session = random.randrange(10)
        blocks = tuple(1_000 * session + i for i in range(tokens // 1024))
        lease = balancer.acquire(Request(b"%d" % session, None, session + 1, tokens, blocks), now)
        choices.append((lease.replica.id, lease.choice.reason))
        open_.append(lease)
        if len(open_) > 4:
            ended = open_.pop(random.randrange(4))
            ended.first_token(now + 1.0)
            cached = ended.choice.resident_tokens
            ended.finish(DONE, Usage(ended.request.prompt_tokens, cached, 100), now + 2.0)
    return choices


def _books(balancer: Balancer) -> list[object]:
    """All that must outlive a switch."""
    books: list[object] = [balancer.leases, dict(balancer.regret.elsewhere), dict(balancer.regret.evicted)]
    for r in balancer.ready:
        books.append((r.in_flight, r.prefill_tokens, r.pending_s, r.prefill_ends, r.served, r.last_lease))
        books.append((len(r.cache), r.cache.held_tokens, r.cache.scale, r.speed.factor, r.speed.decode))
    for n in range(10):
        for branch in balancer.directory.branches(b"%d" % n, 0.0):
            books.append((branch.fingerprint, branch.chain, branch.open, branch.last_use))
            books.append([(home.replica, home.tokens, home.last_use) for home in branch.homes])
    return books


@pytest.mark.parametrize("after", POLICIES)
def test_a_switch_changes_nothing_but_the_policy(after: str) -> None:
    balancer = fleet(make("session_affinity"), "abcd")
    open_: list[Lease] = []
    _life(balancer, 0, 60, open_)
    before, policy = _books(balancer), make(after)
    balancer.switch(policy, 200.0)
    assert balancer.policy is policy
    assert _books(balancer) == before
    _life(balancer, 70, 30, open_)
    for lease in open_:
        lease.finish(CLIENT_LEFT, None, 400.0)
    assert [(r.in_flight, r.prefill_tokens, r.pending_s) for r in balancer.ready] == [(0, 0, 0.0)] * 4


def test_a_policy_that_is_not_asked_for_events_costs_none() -> None:
    balancer = fleet(LeastLoaded(), "ab")
    assert not balancer.told
    balancer.switch(Recorder(), 1.0)
    assert balancer.told
    balancer.switch(LeastLoaded(), 2.0)
    balancer.run_shadow(Recorder(), 3.0)
    assert balancer.told
    balancer.run_shadow(None, 4.0)
    assert not balancer.told


# Shadow


@pytest.mark.parametrize("shadow", POLICIES)
@pytest.mark.parametrize("live", ["session_affinity", "sticky", "random"])
def test_a_shadow_changes_nothing_that_follows(live: str, shadow: str) -> None:
    alone, beside = fleet(make(live), "abcd"), fleet(make(live), "abcd")
    beside.run_shadow(make(shadow), 0.0)
    assert _life(alone, 0, 150, []) == _life(beside, 0, 150, [])
    plain = [[str(x) for x in _books(b)] for b in (alone, beside)]
    assert plain[0] == plain[1]


class _Last(LeastLoaded):
    """Always the last candidate."""

    def pick(self, request: Request, candidates: Sequence[Replica], now: float) -> Choice:
        return replace(super().pick(request, candidates, now), replica=candidates[-1], reason=Reason.SCORE)


def test_disagreements_are_counted_by_both_reasons() -> None:
    balancer = fleet(make("round_robin"), "abc")
    balancer.run_shadow(_Last(), 0.0)
    chosen = Counter(turn(balancer, Request(), 1.0 + n).replica.id for n in range(9))
    same = chosen["c"]
    assert 0 < same < 9
    assert balancer.disagreements == {
        (Reason.ROTATION, Reason.SCORE, True): same,
        (Reason.ROTATION, Reason.SCORE, False): 9 - same,
    }


def test_a_shadow_that_begins_or_ends_counts_from_nothing() -> None:
    balancer = fleet(make("round_robin"), "abc")
    for shadow in (make("random"), make("least_loaded"), None):
        balancer.run_shadow(shadow, 0.0)
        assert balancer.disagreements == {}
        turn(balancer, Request(), 1.0)
        assert sum(balancer.disagreements.values()) == (shadow is not None)


def test_an_explanation_is_of_the_policy_in_charge_and_counts_nothing() -> None:
    balancer = fleet(make("round_robin"), "abc")
    balancer.run_shadow(_Last(), 0.0)
    assert balancer.explain(Request(), 1.0).reason is Reason.ROTATION
    assert balancer.disagreements == {}


def test_a_shadow_hears_what_happened_not_what_it_would_have_done() -> None:
    balancer, shadow = fleet(make("round_robin"), "ab"), Recorder(_Last())
    balancer.run_shadow(shadow, 0.0)
    assert shadow.events == [ReplicaAdded(0.0, r) for r in balancer.ready]
    lease = balancer.acquire(Request(b"k", prompt_tokens=5), 1.0)
    lease.first_token(2.0)
    lease.finish(DONE, None, 3.0)
    assert [type(event) for event in shadow.events[2:]] == [Routed, FirstToken, Finished]
    (routed,) = shadow.told(Routed)
    assert isinstance(routed, Routed)
    assert routed.choice is lease.choice
    balancer.run_shadow(None, 4.0)
    told = len(shadow.events)
    turn(balancer, Request(), 5.0)
    assert len(shadow.events) == told


def test_a_shadow_outlives_a_switch() -> None:
    balancer, shadow = fleet(make("round_robin"), "ab"), make("random")
    balancer.run_shadow(shadow, 0.0)
    turn(balancer, Request(), 1.0)
    balancer.switch(make("least_loaded"), 5.0)
    assert balancer.shadow is shadow
    turn(balancer, Request(), 6.0)
    assert sum(balancer.disagreements.values()) == 2


class _Faulty(LeastLoaded):
    """Fails when asked, or when told of the named event."""

    def __init__(self, on: type | None = None) -> None:
        super().__init__()
        self.on = on

    def pick(self, request: Request, candidates: Sequence[Replica], now: float) -> Choice:
        if self.on is None:
            raise RuntimeError("a fault of its own")
        return super().pick(request, candidates, now)

    def observe(self, event: Event) -> None:
        if type(event) is self.on:
            raise RuntimeError("a fault of its own")


@pytest.mark.parametrize("on", [None, Routed, FirstToken, Finished], ids=lambda on: on.__name__ if on else "pick")
def test_a_fault_of_a_shadow_ends_it_and_no_request(on: type | None) -> None:
    balancer = fleet(make("session_affinity"), "ab")
    balancer.run_shadow(_Faulty(on), 0.0)
    lease = turn(balancer, Request(b"k", prompt_tokens=1_000), 1.0)
    assert lease.finished
    assert balancer.shadow is None
    assert "a fault of its own" in balancer.shadow_fault
    assert turn(balancer, Request(b"k", prompt_tokens=1_000), 5.0).replica is lease.replica
    assert [(r.in_flight, r.pending) for r in balancer.ready] == [(0, 0)] * 2
    balancer.run_shadow(make("random"), 6.0)
    assert balancer.shadow_fault == ""
