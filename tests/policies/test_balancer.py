"""Facts of the Balancer and its leases, one at a time; their interplay is in test_balancer_machine.py."""

from __future__ import annotations

import pytest

from policies.balancer import Balancer, NoReplica
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
from policies.lease import Lease
from policies.registry import POLICIES, make
from policies.residency import Home
from policies.types import Cause, Load, Outcome, Phase, Reason, Replica, Request, State, Usage
from tests.fakes.fleet import DONE, REFUSED, fleet, turn
from tests.fakes.recorder import Recorder


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


def _homes(balancer: Balancer, key: bytes, now: float) -> list[Home]:
    """Of all its branches, the latest first."""
    return [home for branch in balancer.directory.branches(key, now) for home in branch.homes]


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
        FirstToken(2.5, request, replica, 1.5, lease.choice),
        Finished(4.0, request, replica, DONE, usage, lease.choice, 2.5),
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
    assert _homes(balancer, b"k", 4.0) == [], "nothing shows that anything was computed there"
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
    turn(balancer, Request(key=b"k", prompt_tokens=10_000), 1.0, prompt=10_000, completion=500)
    lease = balancer.acquire(Request(key=b"k", prompt_tokens=12_000), 5.0)
    assert (lease.choice.resident_tokens, replica.prefill_tokens) == (10_500, 1_500)
    shrunk = balancer.acquire(Request(key=b"k", prompt_tokens=4_000), 5.0)
    assert (shrunk.choice.resident_tokens, replica.prefill_tokens) == (4_000, 1_500)
    lease.finish(DONE, None, 6.0)
    assert replica.prefill_tokens == 0


def test_the_estimate_of_a_prompt_is_corrected_by_what_was_reported_of_its_conversation() -> None:
    balancer = fleet(Recorder(), "a")
    turn(balancer, Request(key=b"k", fingerprint=1, prompt_tokens=1_000), 1.0, prompt=1_500)
    known, other = Request(b"k", None, 1, 2_000), Request(b"k", None, 2, 2_000)
    for _ in range(2):  # however often it is looked at
        balancer.explain(known, 3.0)
        balancer.explain(other, 3.0)
        assert (known.prompt_tokens, other.prompt_tokens) == (3_000, 2_000)
        assert known.estimate_tokens == 2_000
    balancer.directory.forget(b"k")
    balancer.explain(known, 4.0)
    assert known.prompt_tokens == 2_000


@pytest.mark.parametrize(("prompt", "ratio"), [(10**9, 10.0), (1, 0.1)])
def test_an_absurd_report_corrects_an_estimate_within_bounds(prompt: int, ratio: float) -> None:
    balancer = fleet(Recorder(), "a")
    turn(balancer, Request(key=b"k", prompt_tokens=1_000), 1.0, prompt=prompt)
    request = Request(key=b"k", prompt_tokens=5_000)
    balancer.explain(request, 3.0)
    assert request.prompt_tokens == 5_000 * ratio


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


@pytest.mark.parametrize("policy", POLICIES)
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


def test_what_is_no_turn_of_a_conversation_goes_home_and_leaves_no_trace() -> None:
    balancer = fleet(make("session_affinity"))
    home = turn(balancer, Request(b"k", None, 7, 1_000), 1.0).replica
    (noted,) = _homes(balancer, b"k", 2.0)
    before = (noted.tokens, noted.last_use, home.cache.held_tokens)
    lease = turn(balancer, Request(b"k", None, 7, 1_000, turn=False), 50.0)
    stranger = turn(balancer, Request(b"new", None, 7, 1_000, turn=False), 52.0)
    assert lease.replica is home
    assert (noted.tokens, noted.last_use, home.cache.held_tokens) == before
    assert len(balancer.directory) == 1
    assert [(r.in_flight, r.pending) for r in (home, stranger.replica)] == [(0, 0)] * 2


def test_the_home_is_known_from_the_moment_of_choice() -> None:
    """A fork sent while the first answer is awaited must find it."""
    balancer = fleet(make("session_affinity"))
    first = balancer.acquire(Request(key=b"k", fingerprint=1, prompt_tokens=50_000), 1.0)
    fork = balancer.acquire(Request(key=b"k", fingerprint=1, prompt_tokens=51_000), 1.0)
    assert (fork.replica, fork.choice.reason) == (first.replica, Reason.HOME)
    assert fork.choice.resident_tokens == 50_000


@pytest.mark.parametrize(
    ("usage", "tokens"),
    [
        (Usage(100, 0, 20), 120),
        (Usage(100), 100),
        (None, 90),  # it answered, so it holds what was estimated
        (Usage(), 90),
        (Usage(0, 0, 5), 90),
    ],
)
def test_usage_is_noted_as_prompt_and_completion(usage: Usage | None, tokens: int) -> None:
    balancer = fleet(Recorder(), "a")
    lease = balancer.acquire(Request(key=b"k", prompt_tokens=90), 1.0)
    lease.first_token(1.5)
    lease.finish(DONE, usage, 2.0)
    assert [(home.replica.id, home.tokens, home.last_use) for home in _homes(balancer, b"k", 2.0)] == [
        ("a", tokens, 2.0)
    ]


@pytest.mark.parametrize("outcome", [Outcome(c, p) for c in Cause for p in Phase], ids=str)
def test_what_brought_no_answer_leaves_the_tokens_that_were_there(outcome: Outcome) -> None:
    balancer = fleet(make("session_affinity"))
    home = turn(balancer, Request(key=b"k", prompt_tokens=900), 1.0, prompt=1_000, completion=100).replica
    lease = balancer.acquire(Request(key=b"k", prompt_tokens=50_000), 3.0)
    assert lease.replica is home
    lease.finish(outcome, None, 4.0)
    (noted,) = _homes(balancer, b"k", 4.0)
    assert (noted.replica, noted.tokens, home.cache.held_tokens) == (home, 1_100, 1_100)
    stranger = balancer.acquire(Request(key=b"new", prompt_tokens=50_000), 5.0)
    stranger.finish(outcome, None, 6.0)
    assert _homes(balancer, b"new", 6.0) == []
    assert sum(replica.cache.held_tokens for replica in balancer.ready) == 1_100


def _resident(balancer: Balancer, replica_id: str, fingerprint: int, tokens: int, now: float) -> None:
    """A conversation of session k becomes resident on the replica, wherever the policy would have it."""
    others = tuple(r for r in balancer.ready if r.id != replica_id)
    turn(balancer, Request(b"k", None, fingerprint, tokens, failed=others), now, prompt=tokens, completion=0)


def test_a_request_is_shown_who_holds_it_among_the_candidates_its_own_branch_first() -> None:
    balancer = fleet(make("round_robin"), "abcd")
    for n, replica_id in enumerate("abcd"):
        _resident(balancer, replica_id, 7, 100 * (n + 1), 10.0 * n)
    _resident(balancer, "a", 8, 900, 50.0)
    fork = balancer.acquire(Request(b"k", None, 7, 50, failed=tuple(balancer.replicas[i] for i in "acd")), 60.0)
    balancer.set_state(balancer.replicas["d"], State.DRAINING, 61.0)
    request = Request(b"k", None, 7, 250, failed=(balancer.replicas["c"],))
    balancer.explain(request, 62.0)
    assert [(r.replica.id, r.tokens, r.gpu_tokens, r.own) for r in request.residents] == [
        ("b", 50, 50, True),
        ("a", 100, 100, True),
    ]
    assert (request.known, request.lost, request.concurrent, request.once_tokens) == (True, True, True, 250)
    fork.finish(DONE, None, 63.0)


@pytest.mark.parametrize("outcome", [REFUSED, Outcome(Cause.CLIENT, Phase.HEADERS)], ids=["refused", "client left"])
def test_what_was_there_before_the_cache_was_cleared_does_not_come_back_with_a_failure(outcome: Outcome) -> None:
    balancer = fleet(make("session_affinity"), "a")
    turn(balancer, Request(b"k", None, 7, 1_000), 1.0)
    lease = balancer.acquire(Request(b"k", None, 7, 2_000), 3.0)
    balancer.cache_cleared(balancer.replicas["a"], 4.0)
    lease.finish(outcome, None, 5.0)
    assert balancer.replicas["a"].cache.held_tokens == 0
    assert balancer.explain(Request(b"k", None, 7, 2_000), 6.0).resident_tokens == 0


def test_an_answer_does_not_bring_a_forgotten_session_back() -> None:
    balancer = fleet(make("session_affinity"), "a", directory=Directory(max_sessions=1))
    lease = balancer.acquire(Request(b"k", None, 7, 1_000), 1.0)
    turn(balancer, Request(b"other", None, 7, 1_000), 2.0)
    lease.finish(DONE, Usage(1_000, 0, 10), 4.0)
    assert not balancer.directory.branches(b"k", 5.0)
    assert balancer.directory.branches(b"other", 5.0)
    assert balancer.replicas["a"].cache.held_tokens == 1_100


def test_a_branch_has_few_homes_and_those_it_had_take_no_room() -> None:
    balancer = fleet(make("random"), "abcdef")
    for n, replica_id in enumerate("abcdef"):
        _resident(balancer, replica_id, 7, 1_000, 10.0 * n)
    (branch,) = balancer.directory.branches(b"k", 70.0)
    assert [home.replica.id for home in branch.homes] == ["f", "e", "d", "c"]
    assert [r.cache.held_tokens for r in balancer.ready] == [0, 0, 1_000, 1_000, 1_000, 1_000]


def test_a_forks_first_answer_does_not_talk_the_cache_small() -> None:
    """It was believed to begin like another that was used just now; what came before that did not push it out."""
    balancer = fleet(make("session_affinity"), "a")
    (a,) = balancer.ready
    a.reports_cached = True
    for n in range(10):
        turn(balancer, Request(b"%d" % n, None, 7, 100_000), 10.0 * n, prompt=100_000)
    main = balancer.acquire(Request(b"9", None, 7, 100_000), 200.0)
    fork = balancer.acquire(Request(b"9", None, 7, 100_000), 200.5)
    assert fork.choice.resident_tokens == 100_000
    fork.finish(DONE, Usage(100_000, 0, 10), 201.0)
    assert a.cache.scale == 1.0
    main.finish(DONE, Usage(100_000, 100_000, 10), 202.0)


def test_another_conversation_of_the_session_holds_nothing_of_it() -> None:
    balancer = fleet(make("session_affinity"))
    turn(balancer, Request(b"k", None, 7, 1_000), 1.0)
    request = Request(b"k", None, 8, 1_000)
    balancer.explain(request, 3.0)
    assert (request.residents, request.known, request.concurrent) == ((), True, False)


def test_a_subagent_is_shown_what_it_has_in_common_with_its_parent() -> None:
    balancer = fleet(make("session_affinity"))
    main, block = tuple(range(1, 41)), 1 << 40
    turn(balancer, Request(b"p", None, 7, 40_000, blocks=main), 1.0, prompt=40_000, completion=0)
    copy = Request(b"c", b"p", 7, 40_000, blocks=main[:20] + tuple(block + n for n in range(20)))
    balancer.explain(copy, 3.0)
    assert [(r.tokens, r.own) for r in copy.residents] == [(20_000, False)]
    fresh = Request(b"c", b"p", 8, 40_000)
    balancer.explain(fresh, 3.0)
    assert fresh.residents == ()
    lease = balancer.acquire(copy, 3.0)
    lease.finish(DONE, Usage(40_000, 20_000, 0), 4.0)
    again = Request(b"c", b"p", 7, 40_000, blocks=copy.blocks)
    balancer.explain(again, 5.0)
    assert [(r.tokens, r.own) for r in again.residents] == [(40_000, True)]


# Which conversation a request belongs to


def test_a_request_that_visibly_continues_the_only_branch_needs_no_closer_look() -> None:
    balancer = fleet(make("session_affinity"))
    blocks = tuple(range(1, 33))
    assert balancer.unsure(b"k", blocks, 0.0), "an unknown session"
    assert balancer.unsure(None, blocks, 0.0), "no session at all"
    lease = balancer.acquire(Request(b"k", None, 7, 32_000, blocks=blocks), 1.0)
    assert balancer.unsure(b"k", blocks, 1.0), "under way: this may be a fork"
    lease.finish(DONE, Usage(32_000, 0, 10), 2.0)
    assert not balancer.unsure(b"k", (*blocks, 33, 34), 3.0)
    assert balancer.unsure(b"k", (), 3.0)
    assert balancer.unsure(b"k", (*blocks[:8], *range(100, 130)), 3.0), "a quarter in common: its history was rewritten"
    turn(balancer, Request(b"k", None, 8, 500), 4.0)
    assert balancer.unsure(b"k", blocks, 6.0), "two conversations"


def test_to_ask_whether_it_is_unsure_changes_nothing() -> None:
    balancer = fleet(make("session_affinity"))
    blocks = tuple(range(1, 33))
    lease = balancer.acquire(Request(b"k", None, 7, 32_000, blocks=blocks), 1.0)
    (branch,) = balancer.directory.branches(b"k", 1.0)
    before = (branch.chain, branch.open, branch.last_use, branch.fingerprint, branch.ratio, len(balancer.directory))
    answers = [balancer.unsure(key, blocks, 1.5) for _ in range(3) for key in (b"k", b"other", None)]
    assert answers == [True] * 9
    (same,) = balancer.directory.branches(b"k", 1.5)
    assert same is branch
    assert before == (branch.chain, branch.open, branch.last_use, branch.fingerprint, branch.ratio, 1)
    lease.finish(DONE, None, 2.0)


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
    homes = [(h, h.tokens, h.last_use) for h in _homes(balancer, b"k", 3.0)]
    held = [r.cache.held_tokens for r in balancer.ready]
    for key in (None, b"k", b"new"):
        explained = balancer.explain(Request(key=key), 3.0)
        assert balancer.explain(Request(key=key), 3.0).replica is explained.replica
    assert recorder.events[told:] == []
    assert counts == [(r.in_flight, r.prefill_tokens, r.served) for r in balancer.ready]
    assert homes == [(h, h.tokens, h.last_use) for h in _homes(balancer, b"k", 3.0)]
    assert held == [r.cache.held_tokens for r in balancer.ready]
    assert len(balancer.directory) == 1


@pytest.mark.parametrize("policy", POLICIES)
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
