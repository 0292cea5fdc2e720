"""Facts of the Balancer and its leases, one at a time; their interplay is in test_balancer_machine.py."""

from __future__ import annotations

import pytest

from policies.balancer import Balancer, Lease, NoReplica
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
from policies.registry import make
from policies.types import Cause, Load, Outcome, Phase, Reason, Replica, Request, State, Usage
from tests.fakes.fleet import DONE, REFUSED, fleet, turn
from tests.fakes.recorder import Recorder


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


def _ids(balancer: Balancer) -> list[str]:
    return [r.id for r in balancer.ready]


def _failure(balancer: Balancer, request: Request | None = None) -> str:
    """The reason for which neither a lease nor an explanation is to be had."""
    with pytest.raises(NoReplica) as error:
        balancer.acquire(request or Request(), 1.0)
    with pytest.raises(NoReplica) as explained:
        balancer.explain(request or Request(), 1.0)
    assert explained.value.reason == error.value.reason == str(error.value)
    return error.value.reason


# The fleet


def test_ready_replicas_are_listed_in_order_of_id() -> None:
    balancer = fleet(Recorder(), "cab")
    assert _ids(balancer) == ["a", "b", "c"]


def test_only_ready_replicas_are_candidates() -> None:
    balancer = fleet(Recorder())
    balancer.set_state(balancer.replicas["a"], State.DRAINING, 1.0)
    balancer.set_state(balancer.replicas["c"], State.EJECTED, 1.0)
    assert _ids(balancer) == ["b"]
    assert {balancer.acquire(Request(), 2.0).replica.id for _ in range(5)} == {"b"}
    balancer.set_state(balancer.replicas["c"], State.READY, 3.0)
    assert _ids(balancer) == ["b", "c"]


def test_a_replica_may_join_before_it_is_ready() -> None:
    balancer = Balancer(Recorder())
    balancer.join(Replica("a", state=State.EJECTED), 1.0)
    assert _failure(balancer) == "all_ejected"


def test_leaving_takes_an_id_that_is_known() -> None:
    balancer = fleet(Recorder(), "a")
    assert balancer.leave("a", 1.0).id == "a"
    with pytest.raises(KeyError, match="a"):
        balancer.leave("a", 2.0)


def test_a_policy_is_told_of_the_fleet(recorder: Recorder) -> None:
    balancer = Balancer(recorder)
    old, new = Replica("a"), Replica("a")
    balancer.join(old, 1.0)
    balancer.join(new, 2.0)
    balancer.set_state(new, State.EJECTED, 3.0)
    balancer.set_state(new, State.EJECTED, 4.0)  # no change, no event
    load = Load(at=5.0)
    balancer.report(new, load, 5.0)
    balancer.cache_cleared(new, 6.0)
    balancer.leave("a", 7.0)
    assert recorder.events == [
        ReplicaAdded(1.0, old),
        ReplicaRemoved(2.0, old),
        ReplicaAdded(2.0, new),
        ReplicaChanged(3.0, new, State.READY),
        LoadReported(5.0, new, load),
        CacheCleared(6.0, new),
        ReplicaRemoved(7.0, new),
    ]


def test_late_news_of_a_replica_that_left_does_not_reach_the_policy(recorder: Recorder) -> None:
    """Probes and polls are under way when a replica leaves; a policy that keeps state by replica would leak."""
    balancer = fleet(recorder, "ab")
    gone = balancer.leave("a", 1.0)
    told = len(recorder.events)
    balancer.set_state(gone, State.EJECTED, 2.0)
    balancer.report(gone, Load(at=2.0), 2.0)
    balancer.cache_cleared(gone, 2.0)
    assert recorder.events[told:] == []


def test_late_news_of_a_replica_that_left_does_not_bring_it_back() -> None:
    balancer = fleet(Recorder(), "ab")
    balancer.set_state(balancer.replicas["a"], State.EJECTED, 1.0)
    gone = balancer.leave("a", 1.0)
    balancer.set_state(gone, State.READY, 2.0)
    balancer.report(gone, Load(at=2.0), 2.0)
    assert _ids(balancer) == ["b"]


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), -1.0])
def test_an_impossible_weight_is_refused(weight: float) -> None:
    with pytest.raises(ValueError, match=f"a: weight must be .*, got {weight}"):
        Balancer(Recorder()).join(Replica("a", weight=weight), 1.0)


# Leases


def test_a_lease_counts_on_its_replica_until_it_is_finished(recorder: Recorder) -> None:
    balancer = fleet(recorder, "a")
    (replica,) = balancer.ready
    lease = balancer.acquire(Request(prompt_tokens=700), 1.0)
    assert (replica.in_flight, replica.prefill_tokens, replica.served) == (1, 700, 1)
    lease.first_token(2.0)
    assert (replica.in_flight, replica.prefill_tokens, replica.served) == (1, 0, 1)
    lease.finish(DONE, None, 3.0)
    assert (replica.in_flight, replica.prefill_tokens, replica.served) == (0, 0, 1)


def test_a_lease_is_told_from_choice_to_end(recorder: Recorder) -> None:
    balancer = fleet(recorder, "a")
    (replica,) = balancer.ready
    request, usage = Request(prompt_tokens=700), Usage(650, 0, 30)
    lease = balancer.acquire(request, 1.0)
    lease.first_token(2.5)
    lease.finish(DONE, usage, 4.0)
    assert recorder.events[1:] == [
        Routed(1.0, request, lease.choice),
        FirstToken(2.5, request, replica, 1.5),
        Finished(4.0, request, replica, DONE, usage),
    ]


@pytest.mark.parametrize("outcome", [Outcome(c, p) for c in Cause for p in Phase], ids=lambda o: f"{o.cause}-{o.phase}")
def test_whatever_the_end_the_place_is_given_back(outcome: Outcome) -> None:
    balancer = fleet(Recorder(), "a")
    (replica,) = balancer.ready
    lease = balancer.acquire(Request(key=b"k", prompt_tokens=700), 1.0)
    lease.finish(outcome, None, 2.0)
    assert lease.finished
    assert (replica.in_flight, replica.prefill_tokens) == (0, 0)


def test_a_second_finish_does_nothing(recorder: Recorder) -> None:
    balancer = fleet(recorder, "a")
    (replica,) = balancer.ready
    lease = balancer.acquire(Request(key=b"k", prompt_tokens=700), 1.0)
    other = balancer.acquire(Request(prompt_tokens=50), 1.0)
    lease.finish(REFUSED, None, 2.0)
    lease.finish(DONE, Usage(10**6, 0, 0), 3.0)
    lease.first_token(4.0)
    assert (replica.in_flight, replica.prefill_tokens) == (1, 50)
    assert [e.outcome for e in recorder.told(Finished) if isinstance(e, Finished)] == [REFUSED]
    assert recorder.told(FirstToken) == []
    assert balancer.directory.homes(b"k", 4.0)[0].tokens == 0
    other.finish(DONE, None, 5.0)
    assert (replica.in_flight, replica.prefill_tokens) == (0, 0)


def test_a_second_first_token_frees_nothing_more() -> None:
    balancer = fleet(Recorder(), "a")
    (replica,) = balancer.ready
    lease = balancer.acquire(Request(prompt_tokens=700), 1.0)
    balancer.acquire(Request(prompt_tokens=50), 1.0)
    lease.first_token(2.0)
    lease.first_token(3.0)
    assert replica.prefill_tokens == 50


def test_a_first_token_is_told_once(recorder: Recorder) -> None:
    lease = fleet(recorder, "a").acquire(Request(prompt_tokens=700), 1.0)
    lease.first_token(2.0)
    lease.first_token(30.0)
    assert [e.waited_s for e in recorder.told(FirstToken) if isinstance(e, FirstToken)] == [1.0]


def test_a_lease_of_a_replica_that_left_ends_on_the_replica_that_left() -> None:
    balancer = fleet(Recorder(), "a")
    old = balancer.ready[0]
    lease = balancer.acquire(Request(key=b"k", prompt_tokens=700), 1.0)
    new = Replica("a")
    balancer.join(new, 2.0)
    assert (old.in_flight, new.in_flight) == (1, 0)
    fresh = balancer.acquire(Request(prompt_tokens=30), 3.0)
    lease.first_token(4.0)
    lease.finish(DONE, Usage(700, 0, 10), 5.0)
    assert (old.in_flight, old.prefill_tokens) == (0, 0)
    assert (new.in_flight, new.prefill_tokens) == (1, 30)
    fresh.finish(DONE, None, 6.0)
    assert (new.in_flight, new.prefill_tokens) == (0, 0)


def test_the_same_object_that_leaves_and_returns_keeps_its_open_leases() -> None:
    balancer = fleet(Recorder(), "a")
    lease = balancer.acquire(Request(prompt_tokens=5), 1.0)
    replica = balancer.leave("a", 2.0)
    balancer.join(replica, 3.0)
    balancer.join(replica, 4.0)
    assert (replica.in_flight, replica.since) == (1, 4.0)
    lease.finish(DONE, None, 5.0)
    assert replica.in_flight == 0
    assert balancer.ready == (replica,)


def test_what_is_resident_is_not_counted_as_prefill() -> None:
    balancer = fleet(make("session_affinity"), "a")
    (replica,) = balancer.ready
    turn(balancer, Request(key=b"k", prompt_tokens=9_000), 1.0, prompt=10_000, completion=500)
    lease = balancer.acquire(Request(key=b"k", prompt_tokens=12_000), 5.0)
    assert (lease.choice.resident_tokens, replica.prefill_tokens) == (10_500, 1_500)
    shrunk = balancer.acquire(Request(key=b"k", prompt_tokens=4_000), 5.0)
    assert (shrunk.choice.resident_tokens, replica.prefill_tokens) == (4_000, 1_500)
    lease.finish(DONE, None, 6.0)
    assert replica.prefill_tokens == 0


@pytest.mark.parametrize("tokens", [-5, 0, 10**30])
def test_a_bad_estimate_of_the_prompt_does_not_unbalance_the_counts(tokens: int) -> None:
    balancer = fleet(Recorder(), "a")
    (replica,) = balancer.ready
    lease = balancer.acquire(Request(prompt_tokens=tokens), 1.0)
    assert replica.prefill_tokens == max(tokens, 0)
    lease.finish(DONE, None, 2.0)
    assert replica.prefill_tokens == 0


# Refusals


def test_an_empty_fleet_is_said_to_be_empty() -> None:
    assert _failure(Balancer(Recorder())) == "no_replicas"


@pytest.mark.parametrize(
    ("states", "reason"),
    [
        ((State.DRAINING, State.DRAINING), "all_draining"),
        ((State.EJECTED, State.EJECTED), "all_ejected"),
        ((State.EJECTED, State.DRAINING), "all_ejected"),
    ],
)
def test_a_fleet_that_cannot_serve_says_why(states: tuple[State, State], reason: str) -> None:
    balancer = fleet(Recorder(), "ab")
    for replica, state in zip(balancer.ready, states, strict=True):
        balancer.set_state(replica, state, 1.0)
    assert _failure(balancer) == reason
    assert len(balancer.directory) == 0


def test_a_request_that_failed_everywhere_is_refused_and_leaves_no_trace(recorder: Recorder) -> None:
    balancer = fleet(recorder, "ab")
    told = len(recorder.events)
    assert _failure(balancer, Request(key=b"k", failed=balancer.ready)) == "all_failed"
    assert [(r.in_flight, r.served) for r in balancer.ready] == [(0, 0), (0, 0)]
    assert len(balancer.directory) == 0
    assert recorder.events[told:] == []


def test_a_request_that_failed_on_all_that_is_left_is_told_so() -> None:
    balancer = fleet(Recorder(), "ab")
    a, b = balancer.ready
    balancer.set_state(b, State.DRAINING, 1.0)
    assert _failure(balancer, Request(failed=(a,))) == "all_failed"
    balancer.set_state(a, State.DRAINING, 1.0)
    assert _failure(balancer, Request(failed=(a,))) == "all_draining"


def test_a_replica_that_returned_may_be_tried_though_its_forerunner_failed() -> None:
    balancer = fleet(Recorder(), "a")
    failed = balancer.ready
    balancer.join(Replica("a"), 1.0)
    assert balancer.acquire(Request(failed=failed), 2.0).replica is balancer.replicas["a"]


@pytest.mark.parametrize("policy", ["round_robin", "random", "least_loaded", "rendezvous", "session_affinity"])
def test_redispatch_tries_every_replica_once_then_gives_up(policy: str) -> None:
    balancer = fleet(make(policy), "abcd")
    request = Request(key=b"k", prompt_tokens=10)
    tried: list[str] = []
    for _ in range(4):
        lease = balancer.acquire(request, 1.0)
        tried.append(lease.replica.id)
        lease.finish(REFUSED, None, 1.0)
        request.failed += (lease.replica,)
    assert _failure(balancer, request) == "all_failed"
    assert sorted(tried) == ["a", "b", "c", "d"]
    assert [(r.in_flight, r.prefill_tokens) for r in balancer.ready] == [(0, 0)] * 4


# Sessions


def test_a_request_without_a_key_is_not_remembered() -> None:
    balancer = fleet(Recorder())
    turn(balancer, Request(fingerprint=7), 1.0)
    assert len(balancer.directory) == 0


def test_the_home_is_known_from_the_moment_of_choice() -> None:
    """A fork sent while the first answer is awaited must find it."""
    balancer = fleet(make("session_affinity"))
    first = balancer.acquire(Request(key=b"k", fingerprint=1), 1.0)
    fork = balancer.acquire(Request(key=b"k", fingerprint=2), 1.0)
    assert (fork.replica, fork.choice.reason) == (first.replica, Reason.HOME)


def test_usage_is_noted_as_prompt_and_completion() -> None:
    balancer = fleet(Recorder(), "a")
    for n, (usage, tokens) in enumerate(
        [(Usage(100, 0, 20), 120), (Usage(100), 100), (None, 0), (Usage(), 0), (Usage(0, 0, 5), 0)]
    ):
        key = b"%d" % n
        lease = balancer.acquire(Request(key=key), 1.0)
        lease.finish(DONE, usage, 2.0)
        assert balancer.directory.homes(key, 2.0)[0].tokens == tokens


def test_a_request_is_shown_its_homes_among_the_candidates_own_first() -> None:
    balancer = fleet(make("round_robin"), "abcd")
    for n, replica_id in enumerate("abcd"):
        balancer.directory.place(b"k", n, replica_id, 100 * (n + 1), 1.0 + n)
    balancer.set_state(balancer.replicas["d"], State.DRAINING, 6.0)
    request = Request(key=b"k", fingerprint=0, failed=(balancer.replicas["c"],))
    balancer.explain(request, 7.0)
    shown = [(r.replica.id, r.tokens, r.same_conversation) for r in request.residents]
    assert (request.known, shown) == (True, [("a", 100, True), ("b", 200, False)])


def test_what_a_request_was_shown_before_is_not_kept() -> None:
    balancer = fleet(make("session_affinity"))
    request = Request(key=b"k")
    turn(balancer, request, 1.0)
    balancer.explain(request, 3.0)
    assert request.known
    balancer.directory.forget(b"k")
    balancer.explain(request, 4.0)
    assert (request.known, request.residents) == (False, ())


def test_an_explanation_changes_nothing(recorder: Recorder) -> None:
    balancer = fleet(recorder)
    turn(balancer, Request(key=b"k"), 1.0)
    told = len(recorder.events)
    counts = [(r.in_flight, r.prefill_tokens, r.served) for r in balancer.ready]
    homes = list(balancer.directory.homes(b"k", 3.0))
    for key in (None, b"k", b"new"):
        explained = balancer.explain(Request(key=key), 3.0)
        assert balancer.explain(Request(key=key), 3.0).replica is explained.replica
    assert recorder.events[told:] == []
    assert counts == [(r.in_flight, r.prefill_tokens, r.served) for r in balancer.ready]
    assert (homes, len(balancer.directory)) == (balancer.directory.homes(b"k", 3.0), 1)


@pytest.mark.parametrize("policy", ["round_robin", "random", "least_loaded", "rendezvous", "session_affinity"])
def test_what_is_explained_is_what_is_done(policy: str) -> None:
    balancer = fleet(make(policy))
    for n in range(30):
        key = None if n % 3 == 0 else b"%d" % (n % 7)
        explained = balancer.explain(Request(key=key), float(n))
        lease = balancer.acquire(Request(key=key), float(n))
        assert (lease.replica, lease.choice.reason) == (explained.replica, explained.reason)


def test_a_clock_that_stands_still_breaks_nothing() -> None:
    balancer = fleet(make("session_affinity"))
    leases: list[Lease] = [balancer.acquire(Request(key=b"%d" % (n % 4)), 0.0) for n in range(20)]
    for lease in leases:
        lease.first_token(0.0)
        lease.finish(DONE, Usage(10, 0, 1), 0.0)
    assert [r.in_flight for r in balancer.ready] == [0, 0, 0]
    assert balancer.explain(Request(key=b"0"), 0.0).reason is Reason.HOME


# Reports


def test_a_report_is_noted_with_our_own_share(recorder: Recorder) -> None:
    balancer = fleet(recorder, "a")
    (replica,) = balancer.ready
    first = balancer.acquire(Request(prompt_tokens=700), 1.0)
    balancer.acquire(Request(prompt_tokens=50), 1.0)
    first.first_token(1.5)
    load = Load(at=2.0, running=5, waiting=1, waiting_tokens=60)
    balancer.report(replica, load, 2.0)
    assert replica.load is load
    assert (load.own_running, load.own_tokens) == (2, 50)
    assert (replica.in_flight, replica.prefill_tokens) == (2, 50), "a report never changes our own counts"


# Policies


def test_a_new_policy_is_told_of_the_fleet_as_it_stands(recorder: Recorder) -> None:
    balancer = fleet(make("random"))
    balancer.set_state(balancer.replicas["b"], State.DRAINING, 1.0)
    balancer.leave("c", 2.0)
    balancer.switch(recorder, 3.0)
    assert recorder.events == [ReplicaAdded(3.0, r) for r in balancer.replicas.values()]
    assert [r.id for r in balancer.replicas.values()] == ["a", "b"]


def test_the_old_policy_hears_no_more(recorder: Recorder) -> None:
    balancer = fleet(recorder)
    lease = balancer.acquire(Request(key=b"k"), 1.0)
    told, successor = len(recorder.events), Recorder()
    balancer.switch(successor, 2.0)
    lease.first_token(3.0)
    lease.finish(DONE, None, 4.0)
    turn(balancer, Request(), 5.0)
    assert recorder.events[told:] == []
    assert len(successor.told(Finished)) == 2


def test_leases_and_loads_outlive_a_switch() -> None:
    balancer = fleet(make("least_loaded"), "ab")
    leases = [balancer.acquire(Request(prompt_tokens=10), 1.0) for _ in range(4)]
    balancer.switch(make("session_affinity"), 2.0)
    assert [(r.in_flight, r.prefill_tokens) for r in balancer.ready] == [(2, 20), (2, 20)]
    for lease in leases:
        lease.finish(DONE, None, 3.0)
    assert [(r.in_flight, r.prefill_tokens) for r in balancer.ready] == [(0, 0), (0, 0)]
