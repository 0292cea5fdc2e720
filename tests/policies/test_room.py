"""Waiting for KV: a full GPU is a queue, too, and the wait there is known before it is chosen."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import room
from policies.balancer import Balancer
from policies.cost import REPORT_MAX_AGE_S
from policies.lease import Lease
from policies.room import ANSWER_TOKENS
from policies.session_affinity import SessionAffinity, SessionAffinityConfig
from policies.types import Load, Reason, Replica, Request, Usage
from tests.fakes.fleet import DONE, fleet, turn

CAPACITY = 450_000
ANSWER_S = 8.0
PLAIN = SessionAffinityConfig(beta=0.0, gamma=0.0, theta_s=0.0)


def _fleet(ids: str = "ab", capacity: int | None = CAPACITY) -> Balancer:
    """Replicas whose capacity is told, and whose answers take eight seconds."""
    balancer = fleet(SessionAffinity(PLAIN), ids)
    for replica in balancer.ready:
        balancer.report(replica, Load(at=0.0, running=0, waiting=0, capacity_tokens=capacity), 0.0)
        replica.speed.observe_answer(ANSWER_S)
    return balancer


def _run(balancer: Balancer, replica: Replica, tokens: int, key: bytes, now: float = 1.0) -> Lease:
    """A request that runs there: its first token has come."""
    others = tuple(other for other in balancer.ready if other is not replica)
    lease = balancer.acquire(Request(key, prompt_tokens=tokens, failed=others), now)
    assert lease.replica is replica
    lease.first_token(now)
    return lease


def test_a_prompt_that_fits_beside_those_that_run_does_not_wait() -> None:
    balancer = _fleet()
    a = balancer.replicas["a"]
    for n in range(4):
        _run(balancer, a, 90_000, b"%d" % n)
    assert room.wait_s(a, CAPACITY - 4 * 90_000 - 5 * ANSWER_TOKENS, 1.0) == 0.0
    assert room.wait_s(a, CAPACITY - 4 * 90_000 - 5 * ANSWER_TOKENS + 1, 1.0) > 0.0


def test_one_that_does_not_waits_until_one_of_those_that_run_has_ended() -> None:
    """The first of five answers of eight seconds each ends after 1.6 s, on average; two of them after 3.2."""
    balancer = _fleet()
    a = balancer.replicas["a"]
    for n in range(5):
        _run(balancer, a, 84_000, b"%d" % n)
    assert room.wait_s(a, 10_000, 1.0) == pytest.approx(ANSWER_S / 5)
    waits = [room.wait_s(a, tokens, 1.0) for tokens in (80_000, 160_000, 240_000)]
    assert waits == sorted(waits)
    assert waits[1] == pytest.approx(ANSWER_S * (420_000 + 160_000 + 6 * ANSWER_TOKENS - CAPACITY) / CAPACITY)


def test_those_that_wait_already_are_before_it() -> None:
    balancer = _fleet()
    a = balancer.replicas["a"]
    for n in range(5):
        _run(balancer, a, 84_000, b"%d" % n)
    before = room.wait_s(a, 50_000, 1.0)
    others = tuple(r for r in balancer.ready if r is not a)
    balancer.acquire(Request(b"waits", prompt_tokens=84_000, failed=others), 1.0)
    assert room.wait_s(a, 50_000, 1.0) > before + 0.5 * ANSWER_S / 5


@pytest.mark.parametrize("unknown", ["capacity", "answers"])
def test_of_what_is_not_known_nothing_is_expected(unknown: str) -> None:
    balancer = fleet(SessionAffinity(PLAIN), "a")
    a = balancer.replicas["a"]
    if unknown == "capacity":
        a.speed.observe_answer(ANSWER_S)
    else:
        balancer.report(a, Load(at=0.0, capacity_tokens=100_000), 0.0)
    for n in range(9):
        balancer.acquire(Request(b"%d" % n, prompt_tokens=90_000), 1.0)
    assert room.wait_s(a, 90_000, 1.0) == 0.0


def test_what_several_share_takes_room_once() -> None:
    """Three forks that go on from their parent's 80,000 tokens, while it waits for them."""
    balancer = _fleet("a")
    a = balancer.replicas["a"]
    parent = tuple(range(1, 81))
    turn(balancer, Request(b"s", prompt_tokens=80_000, blocks=parent), 1.0, prompt=80_000)
    for n in range(3):
        own = tuple(range(1_000 * (n + 1), 1_000 * (n + 1) + 4))
        lease = balancer.acquire(Request(b"s", prompt_tokens=84_000, blocks=parent + own), 3.0 + n)
        lease.first_token(3.0 + n)
    assert a.in_flight_tokens == 3 * 84_000
    assert 84_000 + 2 * 3_000 <= a.held_tokens <= 84_000 + 2 * 8_000


def test_others_take_what_the_engine_says_is_in_use() -> None:
    """Two reports see three requests that are not ours."""
    balancer = _fleet("a")
    a = balancer.replicas["a"]
    _run(balancer, a, 100_000, b"ours")
    assert room.wait_s(a, 100_000, 2.0) == 0.0
    for at in (2.0, 3.0):
        balancer.report(a, Load(at=at, running=4, waiting=0, used_tokens=400_000, capacity_tokens=CAPACITY), at)
    assert room.wait_s(a, 100_000, 3.0) == pytest.approx(ANSWER_S / 4)
    assert room.wait_s(a, 100_000, 3.0 + REPORT_MAX_AGE_S + 0.1) == 0.0, "that is too long ago"


def test_new_sessions_go_where_there_is_room() -> None:
    balancer = _fleet()
    a = balancer.replicas["a"]
    for n in range(5):
        _run(balancer, a, 84_000, b"%d" % n)
    assert {balancer.explain(Request(b"new%d" % n, prompt_tokens=60_000), 2.0).replica.id for n in range(20)} == {"b"}


def test_a_session_leaves_a_full_home_only_for_less_than_the_wait_there() -> None:
    """Its 10,000 tokens are computed elsewhere in a second; 80,000 are not worth it."""
    for tokens, leaves in ((10_000, True), (80_000, False)):
        balancer = _fleet()
        a, b = balancer.replicas["a"], balancer.replicas["b"]
        _run(balancer, a, tokens, b"s").finish(DONE, Usage(tokens, None, 100), 2.0)
        balancer.report(b, Load(at=2.0, capacity_tokens=CAPACITY), 2.0)
        a.speed.answer_s = 16.0
        for n in range(5):
            _run(balancer, a, 84_000, b"%d" % n, 3.0)
        choice = balancer.explain(Request(b"s", prompt_tokens=tokens + 100), 4.0)
        assert choice.replica is (b if leaves else a)
        assert choice.reason is (Reason.MOVED if leaves else Reason.HOME)
        terms = {candidate.replica: candidate.terms["room"] for candidate in choice.candidates}
        assert terms[a] > 3.0
        assert terms[b] == 0.0
        assert choice.wait_s == pytest.approx(0.0 if leaves else terms[a])


@given(st.integers(0, 10**6))
def test_the_cost_of_each_is_the_same_however_it_is_reckoned(seed: int) -> None:
    """One by one, as it is explained, and all at once, as it is chosen."""
    random = Random(seed)
    balancer = _fleet("abcdefgh", capacity=random.choice((100_000, 300_000)))
    policy = balancer.policy
    assert isinstance(policy, SessionAffinity)
    leases: list[Lease] = []
    now = 0.0
    for n in range(40):
        now += random.random()
        leases.append(balancer.acquire(Request(b"%d" % n, prompt_tokens=random.randrange(1_000, 90_000)), now))
        if random.random() < 0.5:
            leases.pop(random.randrange(len(leases))).finish(DONE, None, now)
        if random.random() < 0.3:
            replica = random.choice(balancer.ready)
            used = random.randrange(300_000)
            balancer.report(replica, Load(at=now, running=random.randrange(9), used_tokens=used), now)
    prompt = random.randrange(1_000, 90_000)
    now = float(int(now) + 1)  # what decays does so on a grid of a second
    choice = balancer.explain(Request(b"new", prompt_tokens=prompt), now)
    costs = policy._costs(policy._over(balancer.ready, now), prompt, now)
    assert len(choice.candidates) == 8
    for candidate in choice.candidates:
        assert candidate.terms["room"] >= 0.0
        assert candidate.cost == pytest.approx(costs[policy._field.place(candidate.replica)], abs=1e-6)


@given(st.integers(0, 10**6))
def test_all_room_is_given_back_however_requests_end(seed: int) -> None:
    random = Random(seed)
    balancer = _fleet("abc")
    leases: list[Lease] = []
    for n in range(60):
        blocks = tuple(range(1, random.randrange(2, 30))) + (1_000 + n,) * random.randrange(2)
        request = Request(b"%d" % random.randrange(4), None, random.randrange(2), random.randrange(90_000), blocks)
        leases.append(balancer.acquire(request, n / 10))
        for replica in balancer.ready:
            assert 0 <= replica.held_tokens <= replica.in_flight_tokens
        if random.random() < 0.6:
            lease = leases.pop(random.randrange(len(leases)))
            if random.random() < 0.5:
                lease.first_token(n / 10)
            lease.finish(DONE, random.choice((None, Usage(5_000, 1_000, 100))), n / 10)
    for lease in leases:
        lease.finish(DONE, None, 7.0)
    assert [replica.held_tokens for replica in balancer.ready] == [0, 0, 0]
