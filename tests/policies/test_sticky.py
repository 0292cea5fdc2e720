"""sticky: a session stays, a new one goes where the fewest sessions are."""

from __future__ import annotations

from collections import Counter

import pytest

from policies.events import ReplicaRemoved, Routed
from policies.hashing import rendezvous
from policies.registry import make
from policies.types import Choice, Reason, Replica, Request, Resident, State
from tests.fakes.fleet import fleet, turn


def _homes(balancer, sessions: range, now: float) -> dict[int, Replica]:  # type: ignore[no-untyped-def]
    return {n: turn(balancer, Request(key=b"%d" % n), now + n / 1e3).replica for n in sessions}


def test_sessions_are_counted_whether_or_not_they_have_a_request_open() -> None:
    balancer = fleet(make("sticky"), "abcd")
    assert Counter(r.id for r in _homes(balancer, range(40), 1.0).values()) == dict.fromkeys("abcd", 10)


def test_a_session_stays_however_loaded_its_home_is() -> None:
    balancer = fleet(make("sticky"))
    home = turn(balancer, Request(key=b"k"), 1.0).replica
    for n in range(50):
        lease = balancer.acquire(Request(key=b"k"), 2.0 + n)
        assert (lease.replica, lease.choice.reason) == (home, Reason.HOME)


def test_all_agents_of_a_session_go_where_the_session_is() -> None:
    balancer = fleet(make("sticky"))
    home = turn(balancer, Request(key=b"k", fingerprint=1), 1.0).replica
    assert {balancer.acquire(Request(key=b"k", fingerprint=n), 2.0 + n).replica for n in range(1, 20)} == {home}


def test_a_replica_that_joins_gets_the_new_sessions_and_no_old_one() -> None:
    balancer = fleet(make("sticky"), "abc")
    before = _homes(balancer, range(30), 1.0)
    balancer.join(Replica("new"), 2.0)
    assert {r.id for r in _homes(balancer, range(30, 40), 3.0).values()} == {"new"}
    assert _homes(balancer, range(30), 4.0) == before


def test_the_sessions_of_a_lost_replica_spread_evenly_and_no_others_move() -> None:
    balancer = fleet(make("sticky"), "abcd")
    before = _homes(balancer, range(40), 1.0)
    gone = balancer.leave("b", 2.0)
    after = _homes(balancer, range(40), 3.0)
    assert {n for n in before if before[n] is not after[n]} == {n for n in before if before[n] is gone}
    assert sorted(Counter(r.id for r in after.values()).values()) == [13, 13, 14]


def test_sessions_follow_the_weights() -> None:
    balancer = fleet(make("sticky"), "")
    for replica_id, weight in [("big", 3.0), ("small", 1.0), ("spare", 0.0)]:
        balancer.join(Replica(replica_id, weight=weight), 0.0)
    assert Counter(r.id for r in _homes(balancer, range(40), 1.0).values()) == {"big": 30, "small": 10}


def test_among_equals_the_hash_decides_so_that_routers_agree() -> None:
    balancer = fleet(make("sticky"), "abcdef")
    choice = balancer.acquire(Request(key=b"k"), 1.0).choice
    assert (choice.replica, choice.reason) == (rendezvous(b"k", balancer.ready), Reason.NEW)


def test_the_homes_that_another_policy_made_are_kept() -> None:
    balancer = fleet(make("round_robin"), "abcd")
    before = _homes(balancer, range(20), 1.0)
    balancer.switch(make("sticky"), 2.0)
    assert _homes(balancer, range(20), 3.0) == before


def test_a_session_whose_home_is_ejected_moves_and_stays_where_it_went() -> None:
    balancer = fleet(make("sticky"))
    home = turn(balancer, Request(key=b"k"), 1.0).replica
    balancer.set_state(home, State.EJECTED, 2.0)
    lease = turn(balancer, Request(key=b"k"), 3.0)
    assert lease.replica is not home
    assert lease.choice.reason is Reason.HOME_LOST


def test_a_session_whose_cache_was_evicted_is_sent_back_to_its_replica() -> None:
    policy, replicas = make("sticky"), [Replica(i) for i in "abc"]
    policy.observe(Routed(1.0, Request(key=b"k"), Choice(replicas[1], Reason.NEW)))
    choice = policy.pick(Request(key=b"k", known=True), replicas, 2.0)
    assert (choice.replica, choice.reason, choice.resident_tokens) == (replicas[1], Reason.HOME, 0)


def test_what_is_resident_goes_before_what_was_counted() -> None:
    policy, replicas = make("sticky"), [Replica(i) for i in "abc"]
    policy.observe(Routed(1.0, Request(key=b"k"), Choice(replicas[1], Reason.NEW)))
    request = Request(key=b"k", prompt_tokens=500, residents=(Resident(replicas[2], 900, 900),), known=True)
    choice = policy.pick(request, replicas, 2.0)
    assert (choice.replica, choice.reason, choice.resident_tokens) == (replicas[2], Reason.HOME, 500)


def _counts(policy: object) -> object:
    return policy.snapshot().state["sessions"]  # type: ignore[attr-defined]


def test_a_session_is_counted_once_and_where_it_was_last() -> None:
    policy, a, b = make("sticky"), Replica("a"), Replica("b")
    for n, replica in enumerate([a, b, a, a, b]):
        policy.observe(Routed(float(n), Request(key=b"k"), Choice(replica, Reason.NEW)))
    assert _counts(policy) == {"b": 1}


def test_a_request_without_a_session_is_not_counted() -> None:
    policy = make("sticky")
    policy.observe(Routed(1.0, Request(), Choice(Replica("a"), Reason.NO_SESSION)))
    assert _counts(policy) == {}


def test_a_session_without_requests_is_no_longer_counted_after_a_while() -> None:
    policy, a = make("sticky", {"session_expiration_s": 100.0}), Replica("a")
    for key, at in [(b"old", 0.0), (b"kept", 50.0), (b"old", 60.0), (b"other", 160.0)]:
        policy.observe(Routed(at, Request(key=key), Choice(a, Reason.NEW)))
    assert _counts(policy) == {"a": 2}, "`kept` has gone 110 seconds without a request, `old` 100"


def test_no_more_sessions_are_counted_than_allowed() -> None:
    policy, a = make("sticky", {"max_sessions": 10}), Replica("a")
    for n in range(1_000):
        policy.observe(Routed(float(n), Request(key=b"%d" % n), Choice(a, Reason.NEW)))
    assert _counts(policy) == {"a": 10}


def test_a_replica_that_leaves_takes_its_count_with_it() -> None:
    policy, old = make("sticky"), Replica("a")
    policy.observe(Routed(1.0, Request(key=b"k"), Choice(old, Reason.NEW)))
    policy.observe(ReplicaRemoved(2.0, old))
    policy.observe(Routed(3.0, Request(key=b"k"), Choice(Replica("a"), Reason.NEW)))
    assert _counts(policy) == {"a": 1}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"session_expiration_s": 0.0}, "session_expiration_s must be more than 0 seconds and finite, got 0.0"),
        ({"session_expiration_s": float("nan")}, "session_expiration_s must be .*got nan"),
        ({"session_expiration_s": float("inf")}, "session_expiration_s must be .*got inf"),
        ({"max_sessions": 0}, "max_sessions must be 1 or more, got 0"),
    ],
)
def test_a_bad_parameter_is_refused_with_what_is_allowed(given: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make("sticky", given)
