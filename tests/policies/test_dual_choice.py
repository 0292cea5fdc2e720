"""dual_choice: two replicas for each session, affinity between them until it costs too much."""

from __future__ import annotations

from collections import Counter

import pytest

from policies.cost import expected_wait, prefill
from policies.registry import make
from policies.types import Load, Reason, Replica, Request, Resident, State
from tests.fakes.fleet import fleet, turn

KEYS = [f"session-{n}".encode() for n in range(300)]
TOKENS = 40_000


def _pair(key: bytes, replicas: list[Replica]) -> list[Replica]:
    """The session's two replicas: with nothing resident, both come to be chosen as requests stay."""
    policy = make("dual_choice")
    chosen: list[Replica] = []
    for _ in range(2):
        replica = policy.pick(Request(key=key), replicas, 0.0).replica
        chosen.append(replica)
        replica.in_flight += 1
    for replica in chosen:
        replica.in_flight -= 1
    return chosen


def _busy(replica: Replica, seconds: float) -> None:
    replica.prefill_ends = seconds


def test_a_session_never_goes_beyond_its_two_replicas() -> None:
    for key in KEYS[:20]:
        balancer = fleet(make("dual_choice"), "abcdefgh")
        leases = [balancer.acquire(Request(key=key), 1.0) for _ in range(30)]
        assert sorted(Counter(lease.replica.id for lease in leases).values()) == [15, 15]


def test_any_two_replicas_may_be_a_pair_not_only_neighbours_on_the_ring() -> None:
    pairs = set()
    for key in KEYS:
        balancer = fleet(make("dual_choice", {"virtual_nodes": 1}), "abcde")
        pairs.add(frozenset(balancer.acquire(Request(key=key), 1.0).replica.id for _ in range(2)))
    assert len(pairs) > 5


def test_new_sessions_take_the_less_loaded_of_their_two() -> None:
    """Two choices: Mitzenmacher's log log n above the mean, on arcs of uneven length (Byers et al. 2003)."""
    balancer = fleet(make("dual_choice"), "abcdefghij")
    for n, key in enumerate(KEYS):
        lease = balancer.acquire(Request(key=key), float(n))
        lease.first_token(n + 0.5)
        assert lease.choice.reason is Reason.HASH
    assert max(r.in_flight for r in balancer.ready) <= 34


def test_a_session_stays_with_its_cache_while_the_wait_is_within_the_objective() -> None:
    replicas = [Replica(i) for i in "abcdef"]
    home, other = _pair(b"k", replicas)
    request = Request(key=b"k", prompt_tokens=TOKENS, residents=(Resident(home, TOKENS, TOKENS),), known=True)
    _busy(home, 4.5)
    choice = make("dual_choice").pick(request, replicas, 0.0)
    assert (choice.replica, choice.reason, choice.resident_tokens) == (home, Reason.HOME, TOKENS)
    assert choice.wait_s == expected_wait(home, 0.0) == 4.5
    assert choice.prefill_s == prefill(home, TOKENS, request.residents[0])
    assert expected_wait(other, 0.0) == 0.0


def test_it_moves_to_its_other_replica_once_the_wait_is_too_long() -> None:
    replicas = [Replica(i) for i in "abcdef"]
    home, other = _pair(b"k", replicas)
    request = Request(key=b"k", prompt_tokens=TOKENS, residents=(Resident(home, TOKENS, TOKENS),), known=True)
    _busy(home, 6.0)
    choice = make("dual_choice").pick(request, replicas, 0.0)
    assert (choice.replica, choice.reason, choice.resident_tokens) == (other, Reason.MOVED, 0)
    assert make("dual_choice", {"ttft_slo_s": 7.0}).pick(request, replicas, 0.0).replica is home


def test_beyond_the_objective_it_still_stays_where_it_is_served_first() -> None:
    replicas = [Replica(i) for i in "abcdef"]
    home, other = _pair(b"k", replicas)
    request = Request(key=b"k", prompt_tokens=TOKENS, residents=(Resident(home, TOKENS, TOKENS),), known=True)
    _busy(home, 6.0)
    _busy(other, 6.0)
    choice = make("dual_choice").pick(request, replicas, 0.0)
    assert (choice.replica, choice.reason) == (home, Reason.HOME)


def test_of_two_caches_the_longer_counts() -> None:
    replicas = [Replica(i) for i in "abcdef"]
    one, two = _pair(b"k", replicas)
    residents = (Resident(one, 10_000, 10_000), Resident(two, 30_000, 30_000))
    request = Request(key=b"k", prompt_tokens=TOKENS, residents=residents, known=True)
    _busy(two, 1.0)
    choice = make("dual_choice").pick(request, replicas, 0.0)
    assert (choice.replica, choice.reason, choice.resident_tokens) == (two, Reason.HOME, 30_000)


def test_a_cache_beyond_the_two_is_left() -> None:
    replicas = [Replica(i) for i in "abcdef"]
    pair = _pair(b"k", replicas)
    stranger = next(r for r in replicas if r not in pair)
    request = Request(key=b"k", prompt_tokens=TOKENS, residents=(Resident(stranger, TOKENS, TOKENS),), known=True)
    choice = make("dual_choice").pick(request, replicas, 0.0)
    assert choice.replica in pair
    assert choice.reason is Reason.HASH


def test_the_engines_report_of_others_load_counts() -> None:
    balancer = fleet(make("dual_choice"), "ab")
    for _ in range(2):
        balancer.report(balancer.replicas["a"], Load(at=1.0, running=3, waiting=9, waiting_tokens=500_000), 1.0)
    assert balancer.acquire(Request(key=b"k", prompt_tokens=TOKENS), 1.5).replica.id == "b"


def test_when_a_replica_leaves_only_its_place_in_a_pair_is_filled() -> None:
    replicas = [Replica(i) for i in "abcdef"]
    before = {key: set(_pair(key, replicas)) for key in KEYS}
    gone = replicas[2]
    after = {key: set(_pair(key, [r for r in replicas if r is not gone])) for key in KEYS}
    assert all(before[key] - {gone} <= after[key] for key in KEYS)
    assert {len(pair) for pair in after.values()} == {2}


def test_a_replica_that_joins_takes_only_its_share() -> None:
    replicas = [Replica(i) for i in "abcdefghi"]
    before = {key: set(_pair(key, replicas)) for key in KEYS}
    newcomer = Replica("new")
    gained = Counter(
        "new" for key in KEYS for r in set(_pair(key, [*replicas, newcomer])) - before[key] if r is newcomer
    )
    assert gained["new"] == pytest.approx(2 * len(KEYS) / 10, rel=0.4)


def test_the_only_replica_is_both() -> None:
    balancer = fleet(make("dual_choice"), "ab")
    balancer.set_state(balancer.replicas["b"], State.DRAINING, 1.0)
    assert turn(balancer, Request(key=b"k"), 2.0).replica.id == "a"


def test_weights_decide_where_sessions_go() -> None:
    balancer = fleet(make("dual_choice"), "")
    for replica_id, weight in [("a", 1.0), ("b", 1.0), ("c", 2.0), ("d", 4.0), ("spare", 0.0)]:
        balancer.join(Replica(replica_id, weight=weight), 0.0)
    for n in range(400):
        balancer.acquire(Request(key=b"%d" % n), float(n)).first_token(n + 0.5)
    loads = {r.id: r.in_flight for r in balancer.ready}
    assert loads.pop("spare") == 0
    assert loads == pytest.approx({"a": 50, "b": 50, "c": 100, "d": 200}, rel=0.25)


def test_an_explanation_shows_both_and_what_each_would_cost() -> None:
    replicas = [Replica(i) for i in "abcdef"]
    home, other = _pair(b"k", replicas)
    _busy(home, 6.0)
    request = Request(key=b"k", prompt_tokens=TOKENS, residents=(Resident(home, TOKENS, TOKENS),), known=True)
    choice = make("dual_choice").explain(request, replicas, 0.0)
    assert [c.replica for c in choice.candidates] == [other, home]
    assert choice.replica is other
    for candidate in choice.candidates:
        assert candidate.cost == pytest.approx(sum(candidate.terms.values()))
    assert choice.candidates[1].terms["wait"] == 6.0
    assert make("dual_choice").pick(request, replicas, 0.0).candidates == ()


@pytest.mark.parametrize("bad", [-0.1, float("nan"), float("inf")])
def test_an_impossible_objective_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match=f"ttft_slo_s must be 0 seconds or more and finite, got {bad}"):
        make("dual_choice", {"ttft_slo_s": bad})
