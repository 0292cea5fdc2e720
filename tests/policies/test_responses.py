"""Who issued which response: bounded, timed, and no KV of anybody's."""

from __future__ import annotations

import pytest

from policies.admission import Admission, AdmissionConfig, Ticket
from policies.balancer import Balancer
from policies.directory import Directory
from policies.lease import Lease
from policies.registry import make
from policies.responses import PREFIX, Responses, asked, issued
from policies.types import OUTCOMES, Cause, Phase, Reason, Replica, Request, State

KEY = PREFIX + b"0" * 16


def fleet(policy: str = "session_affinity") -> Balancer:
    balancer = Balancer(make(policy), Directory(10, 100.0))
    for name in "abc":
        balancer.join(Replica(name), 0.0)
    return balancer


def test_the_one_used_least_recently_goes_first() -> None:
    responses = Responses(2, 10.0)
    for number, key in enumerate((b"1", b"2", b"1", b"3")):
        responses.put(key, "a", float(number))
    assert [key for key, _ in responses.lately(0.0)] == [b"3", b"1"]
    assert [key for key, _ in responses.lately(3.0)] == [b"3"]
    assert responses.issuer(b"2", 3.0) is None
    assert responses.issuer(b"1", 12.0) == "a"
    assert responses.issuer(b"1", 12.1) is None


@pytest.mark.parametrize("policy", ["session_affinity", "round_robin", "sticky"])
def test_no_policy_is_asked(policy: str) -> None:
    balancer = fleet(policy)
    balancer.hear(issued(KEY, balancer.replicas["b"]), 0.0)
    for number in range(6):
        request = Request(b"%d" % number, prompt_tokens=1000, response=KEY)
        assert balancer.explain(request, 1.0).replica.id == "b"
        lease = balancer.acquire(request, 1.0)
        assert (lease.replica.id, lease.choice.reason) == ("b", Reason.HOME)
        assert lease.choice.prefill_s > 0, "what it costs is told all the same"


def test_it_is_no_session_and_takes_no_room() -> None:
    balancer = fleet()
    for number in range(20):
        balancer.hear(issued(PREFIX + b"%016d" % number, balancer.replicas["b"]), 0.0)
    assert (len(balancer.directory), len(balancer.responses)) == (0, 10)
    cache = balancer.replicas["b"].cache
    assert (len(cache), cache.held_tokens, cache.live(0.0)) == (0, 0, 0.0)


def test_use_keeps_it_known_and_asking_does_not() -> None:
    balancer = fleet()
    balancer.hear(issued(KEY, balancer.replicas["b"]), 0.0)
    balancer.explain(Request(response=KEY), 90.0)
    balancer.acquire(Request(response=KEY), 90.0).finish(OUTCOMES[Cause.DONE, Phase.BODY], None, 91.0)
    assert balancer.explain(Request(response=KEY), 180.0).reason is Reason.HOME
    assert balancer.explain(Request(response=KEY), 191.0).reason is Reason.NO_SESSION


def test_words_for_replicas_that_are_not_known_teach_nothing() -> None:
    balancer = fleet()
    balancer.hear(issued(KEY, Replica("elsewhere")), 0.0)
    balancer.hear(asked(KEY), 0.0)
    assert len(balancer.responses) == 0
    balancer.replicas["b"].incarnation = "second"
    first = Replica("b", incarnation="first")
    balancer.hear(issued(KEY, first), 0.0)
    assert len(balancer.responses) == 0, "the engine that had it is no more"


def test_no_other_gets_it_when_the_issuer_has_failed_it() -> None:
    balancer = fleet("round_robin")
    balancer.hear(issued(KEY, balancer.replicas["b"]), 0.0)
    request = Request(response=KEY, failed=(balancer.replicas["b"],))
    assert balancer.acquire(request, 0.0).replica.id != "b"
    assert request.issuer is None


def test_an_issuer_that_finishes_has_room_though_all_others_are_full() -> None:
    balancer = fleet("least_loaded")
    issuer = balancer.replicas["b"]
    balancer.hear(issued(KEY, issuer), 0.0)
    balancer.set_state(issuer, State.FINISHING, 0.0)
    admission = Admission(balancer, AdmissionConfig(max_running_per_replica=1))
    for _ in "ac":
        assert isinstance(admission.enter(Request(prompt_tokens=10), 1.0), Lease)
    placed = admission.enter(Request(prompt_tokens=10, response=KEY), 1.0)
    assert isinstance(placed, Lease)
    assert placed.replica is issuer
    assert isinstance(admission.enter(Request(prompt_tokens=10, response=KEY), 1.0), Ticket), "now all are full"


@pytest.mark.parametrize("others", ["full", "out"])
def test_a_cap_holds_for_an_issuer_that_finishes(others: str) -> None:
    """It waits where no other can take what comes: nobody is held up by it."""
    balancer = fleet()
    admission = Admission(balancer, AdmissionConfig(max_running_per_replica=1))
    balancer.hear(issued(KEY, balancer.replicas["b"]), 0.0)
    busy = admission.enter(Request(response=KEY), 1.0)
    assert isinstance(busy, Lease)
    balancer.set_state(balancer.replicas["b"], State.FINISHING, 2.0)
    for name in "ac":
        if others == "out":
            balancer.set_state(balancer.replicas[name], State.EJECTED, 2.0)
        else:
            assert isinstance(admission.enter(Request(), 2.0), Lease)
    ticket = admission.enter(Request(response=KEY), 3.0)
    assert isinstance(ticket, Ticket)
    assert admission.due(4.0) == []
    busy.finish(OUTCOMES[Cause.DONE, Phase.BODY], None, 5.0)
    assert admission.due(5.0) == [ticket]
    assert ticket.lease is not None
    assert ticket.lease.replica.id == "b"


def test_a_turn_stays_in_its_pool_and_who_asks_for_what_is_there_finds_it() -> None:
    balancer = fleet()
    balancer.join(Replica("small", pool="small"), 0.0)
    balancer.hear(issued(KEY, balancer.replicas["small"]), 0.0)
    turn = balancer.acquire(Request(b"k", prompt_tokens=1000, response=KEY), 1.0)
    assert turn.replica.pool == "", "its model is not served by the pool that issued the response"
    within = balancer.acquire(Request(b"k", prompt_tokens=1000, response=KEY, pool="small"), 1.0)
    assert within.replica.id == "small"
    asked_for = balancer.acquire(Request(turn=False, response=KEY), 1.0)
    assert asked_for.replica.id == "small", "only it can answer, and a path names no model"
    for lease in (turn, within, asked_for):
        lease.finish(OUTCOMES[Cause.DONE, Phase.BODY], None, 2.0)
    assert balancer.in_flight == 0
    assert all(replica.in_flight == 0 for replica in balancer.replicas.values())
