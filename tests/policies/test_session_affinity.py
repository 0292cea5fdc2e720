"""session_affinity: a session stays with its KV cache for as long as that is worth more than the wait there.

In the order of what it promises: staying, load, residency, fleets that change, forks, no state at all, replicas of
different speed, and memory. Each as a law and as a scenario driven through the Balancer.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from math import ceil
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from policies import cost
from policies.balancer import Balancer
from policies.cost import REPORT_MAX_AGE_S
from policies.directory import Directory
from policies.events import FirstToken
from policies.hashing import rendezvous
from policies.lease import Lease
from policies.registry import POLICIES, make
from policies.residency import HEADROOM, LIVE_TAU_S
from policies.session_affinity import SessionAffinity, SessionAffinityConfig
from policies.speed import PER_TOKEN_S, Speed
from policies.types import Candidate, Choice, Load, Reason, Replica, Request, Resident, State, Usage
from tests.fakes.fleet import CLIENT_LEFT, DONE, REFUSED, fleet, turn

MAIN, TITLE, UNHEARD_OF = 11, 22, 33
"""Fingerprints of a main thread, of its title call, and of a conversation nobody has seen."""


def _policy(**parameters: float) -> SessionAffinity:
    return SessionAffinity(SessionAffinityConfig(**parameters))


def _plainly(**parameters: float) -> SessionAffinity:
    """Queue and prefill only: seconds that can be worked out by hand."""
    return _policy(**({"beta": 0.0, "gamma": 0.0, "theta_s": 0.0} | parameters))


def _start(ids: str = "abc", policy: SessionAffinity | None = None, **more: Any) -> Balancer:
    return fleet(policy or SessionAffinity(), ids, **more)


def _main(tokens: int = 50_000, key: bytes = b"k", **more: Any) -> Request:
    return Request(key, None, MAIN, tokens, **more)


def _answer(lease: Lease, now: float, completion: int = 100) -> Lease:
    """It was answered; what was cached is not told, so nothing is learned of speed or capacity."""
    lease.first_token(now)
    lease.finish(DONE, Usage(lease.request.prompt_tokens, None, completion), now + 0.01)
    return lease


def _busy(balancer: Balancer, replica: Replica, until: float, now: float) -> None:
    """Its prefills are expected to be done then; an answer that begins there makes the policy look again."""
    replica.prefill_ends = until
    balancer.policy.observe(FirstToken(now, Request(), replica, 0.0))


def _live(balancer: Balancer, request: Request, now: float, on: str = "") -> Replica:
    """A whole turn, on that replica if one is named."""
    request.failed = tuple(r for r in balancer.ready if on and r.id != on)
    lease = _answer(balancer.acquire(request, now), now + 0.5)
    request.failed = ()
    return lease.replica


def _chain(conversation: int, blocks: int, parted: int = 0, branch: int = 0) -> tuple[int, ...]:
    """Blocks of a prompt, a 1,000 tokens each, that from `parted` on are those of one branch only."""
    return tuple(
        (conversation << 40) | ((branch << 20) if parted and i >= parted else 0) | (i + 1) for i in range(blocks)
    )


# 1. It stays where its KV is, unless another is better by more than the hysteresis


@given(
    prompt=st.integers(1_000, 260_000),
    share=st.floats(0.01, 1.0),
    wait=st.floats(0.0, 40.0),
    elsewhere=st.floats(0.0, 40.0),
    hysteresis=st.floats(0.0, 10.0),
)
def test_it_stays_unless_another_is_better_by_more_than_the_hysteresis(
    prompt: int, share: float, wait: float, elsewhere: float, hysteresis: float
) -> None:
    a, b, c = (Replica(i, prefill_ends=ends) for i, ends in (("a", wait), ("b", elsewhere), ("c", elsewhere + 5.0)))
    held = max(1, int(prompt * share))
    request = _main(prompt, residents=(Resident(a, held, held),), known=True)
    speed = Speed()
    stay_s, leave_s = wait + speed.prefill_s(prompt - held, held), elsewhere + speed.prefill_s(prompt, 0)
    assume(abs(stay_s - leave_s - hysteresis) > 1e-6)
    choice = _plainly(hysteresis_s=hysteresis).pick(request, [a, b, c], 0.0)
    if stay_s <= leave_s + hysteresis:
        assert (choice.replica, choice.reason) == (a, Reason.HOME)
    else:
        assert (choice.replica, choice.reason) == (b, Reason.MOVED)


@pytest.mark.parametrize(("beyond_s", "stays"), [(-0.001, True), (0.001, False)])
@pytest.mark.parametrize("hysteresis_s", [0.0, 1.0, 4.0])
def test_the_hysteresis_is_in_seconds(beyond_s: float, stays: bool, hysteresis_s: float) -> None:
    balancer = _start(policy=_plainly(hysteresis_s=hysteresis_s))
    home = _live(balancer, _main(100_000), 0.0)
    request = _main(100_100)
    choice = balancer.explain(request, 100.0)
    assert choice.replica is home
    saved = Speed().prefill_s(request.prompt_tokens, 0) - choice.prefill_s
    _busy(balancer, home, 100.0 + saved + hysteresis_s + beyond_s, 100.0)
    choice = balancer.explain(request, 100.0)
    assert (choice.replica is home) is stays
    assert choice.reason is (Reason.HOME if stays else Reason.MOVED)


@given(st.data())
@settings(max_examples=150)
def test_the_choice_is_of_least_cost_as_explained(data: st.DataObject) -> None:
    """Whatever terms are in the cost: who is left costs more than who is chosen by more than the hysteresis."""
    balancer = _start("abcde")
    random = Random(data.draw(st.integers(0, 10**6)))
    now = 0.0
    for n in range(data.draw(st.integers(0, 25))):
        now += random.random()
        lease = balancer.acquire(_main(random.randrange(1_000, 150_000), b"%d" % random.randrange(8)), now)
        if random.random() < 0.6:
            _answer(lease, now + 0.1)
        if random.random() < 0.2:
            replica = random.choice(balancer.ready)
            balancer.report(replica, Load(at=now, running=random.randrange(20), waiting_tokens=10_000 * n), now)
    request = _main(random.randrange(1_000, 150_000), b"%d" % random.randrange(8))
    choice = balancer.explain(request, now)
    by_cost = {candidate.replica: candidate.cost for candidate in choice.candidates}
    assert len(by_cost) == 5
    for candidate in choice.candidates:
        assert candidate.cost == pytest.approx(sum(candidate.terms.values()))
        assert all(term >= 0.0 for term in candidate.terms.values())
    held = [resident.replica for resident in request.residents]
    slack = 1e-3 + balancer.policy.config.hysteresis_s * bool(held)
    assert by_cost[choice.replica] <= min(by_cost.values()) + slack
    if choice.reason in (Reason.MOVED, Reason.SPLIT):
        incumbent = max(request.residents, key=lambda r: (r.own, r.tokens, r.whole)).replica
        assert by_cost[incumbent] > by_cost[choice.replica] + balancer.policy.config.hysteresis_s - 1e-6


def test_a_session_stays_home_turn_after_turn() -> None:
    balancer = _start()
    home = turn(balancer, _main(), 1.0).replica
    for now in range(10, 100, 10):
        lease = turn(balancer, _main(), float(now))
        assert (lease.replica, lease.choice.reason) == (home, Reason.HOME)


def test_a_session_that_moved_stays_where_it_moved_to() -> None:
    balancer = _start("ab")
    home = _live(balancer, _main(20_000), 0.0)
    _busy(balancer, home, 60.0, 10.0)
    moved = _answer(balancer.acquire(_main(21_000), 10.0), 11.0)
    assert (moved.choice.reason, moved.replica is home) == (Reason.MOVED, False)
    back = _answer(balancer.acquire(_main(22_000), 100.0), 101.0)
    assert (back.choice.reason, back.replica) == (Reason.HOME, moved.replica)


def test_of_two_that_hold_it_the_one_that_begins_sooner_by_more_than_the_hysteresis() -> None:
    balancer = _start("abc", _plainly())
    _live(balancer, _main(50_000), 0.0, on="a")
    _live(balancer, _main(51_000), 10.0, on="b")
    a, b = balancer.replicas["a"], balancer.replicas["b"]
    assert balancer.explain(_main(52_000), 20.0).replica is b, "it holds more"
    _busy(balancer, b, 21.5, 20.0)
    choice = balancer.explain(_main(52_000), 20.0)
    assert (choice.replica, choice.reason, choice.resident_tokens) == (a, Reason.MOVED, 50_100)


def test_resident_tokens_are_what_was_reported_but_never_more_than_the_prompt() -> None:
    balancer = _start()
    turn(balancer, _main(50_000), 1.0, prompt=50_000, completion=500)
    for prompt, resident in [(60_000, 50_500), (50_500, 50_500), (100, 100), (0, 0)]:
        assert balancer.explain(_main(prompt), 5.0).resident_tokens == resident


def test_a_replica_without_weight_keeps_its_sessions_and_gets_no_other() -> None:
    balancer = _start("abc")
    home = _live(balancer, _main(), 0.0)
    home.weight = 0.0
    balancer.set_state(home, State.DRAINING, 1.0)
    balancer.set_state(home, State.READY, 2.0)
    assert balancer.explain(_main(), 3.0).replica is home
    assert home not in {balancer.explain(_main(key=b"%d" % n), 3.0).replica for n in range(50)}


def test_a_replica_without_weight_is_the_last_resort() -> None:
    balancer = Balancer(SessionAffinity())
    for replica_id, weight in (("a", 1.0), ("b", 0.0), ("c", 1.0)):
        balancer.join(Replica(replica_id, weight=weight), 0.0)
    assert {balancer.explain(_main(key=b"%d" % n), 1.0).replica.id for n in range(50)} == {"a", "c"}
    for replica_id in "ac":
        balancer.set_state(balancer.replicas[replica_id], State.EJECTED, 2.0)
    assert balancer.explain(_main(), 3.0).replica.id == "b"


# 2. It is aware of load


def test_a_new_session_goes_where_the_wait_is_least() -> None:
    balancer = _start("")
    for replica in (a := Replica("a"), Replica("b", prefill_ends=3.0), Replica("c", prefill_ends=60.0)):
        balancer.join(replica, 0.0)
    for n in range(50):
        choice = balancer.explain(_main(key=b"%d" % n), 1.0)
        assert (choice.replica, choice.reason) == (a, Reason.NEW)


@given(st.lists(st.tuples(st.floats(0, 20), st.integers(0, 30)), min_size=2, max_size=6), st.floats(0, 20), st.data())
def test_more_load_elsewhere_never_changes_the_choice_for_it(
    loads: list[tuple[float, int]], more_s: float, data: st.DataObject
) -> None:
    replicas = [Replica(f"r{n}", prefill_ends=ends, in_flight=count) for n, (ends, count) in enumerate(loads)]
    request = _main(key=data.draw(st.binary(min_size=1, max_size=4)))
    chosen = SessionAffinity().pick(request, replicas, 0.0).replica
    other = data.draw(st.sampled_from([r for r in replicas if r is not chosen]))
    other.prefill_ends += more_s
    other.in_flight += data.draw(st.integers(0, 5))
    assert SessionAffinity().pick(request, replicas, 0.0).replica is chosen


def test_own_requests_count_from_the_moment_they_are_sent() -> None:
    """A burst at one instant, before any engine could report anything, is spread evenly."""
    balancer = _start("abcdefgh")
    leases = [balancer.acquire(_main(30_000, b"%d" % n), 5.0) for n in range(40)]
    assert Counter(lease.replica.id for lease in leases) == dict.fromkeys("abcdefgh", 5)


def test_heavy_sessions_weigh_by_their_tokens_not_by_their_number() -> None:
    balancer = _start("ab")
    _live(balancer, _main(200_000, b"heavy"), 0.0, on="a")
    for n in range(3):
        _live(balancer, _main(20_000, b"light%d" % n), 10.0 + n, on="b")
    assert {balancer.explain(_main(key=b"%d" % n), 100.0).replica.id for n in range(30)} == {"b"}


def test_sessions_that_are_idle_but_alive_are_load() -> None:
    balancer = _start("ab")
    _live(balancer, _main(150_000, b"idle"), 0.0, on="a")
    keys = [b"%d" % n for n in range(30)]
    assert {balancer.explain(_main(key=k), 300.0).replica.id for k in keys} == {"b"}
    dead = 40 * LIVE_TAU_S
    assert {balancer.explain(_main(key=k), dead).replica.id for k in keys} == {"a", "b"}


@given(st.integers(1, 6), st.integers(1, 12), st.integers(0, 1000))
@settings(max_examples=30)
def test_equal_sessions_are_spread_evenly(replicas: int, each: int, seed: int) -> None:
    balancer = _start("abcdef"[:replicas])
    for n in range(replicas * each):
        _live(balancer, _main(40_000, b"%d.%d" % (seed, n)), 20.0 * n)
    held = Counter(h.replica.id for n in range(replicas * each) for h in _homes(balancer, b"%d.%d" % (seed, n)))
    assert max(held.values()) - min(held.values()) <= 1
    assert len(held) == replicas


def _homes(balancer: Balancer, key: bytes) -> list[Any]:
    return [home for branch in balancer.directory.branches(key, 0.0) for home in branch.homes]


def test_sessions_of_all_sizes_are_spread_by_their_tokens() -> None:
    balancer, random = _start("abcdefgh"), Random(5)
    for replica in balancer.ready:
        replica.cache.resize(3_000_000, None)
    for n in range(200):
        _live(balancer, _main(random.randrange(5_000, 150_000), b"%d" % n), 1.0 * n)
    held = [replica.cache.held_tokens for replica in balancer.ready]
    assert max(held) <= 1.1 * sum(held) / len(held)


def test_a_report_adds_to_own_knowledge_and_never_replaces_it() -> None:
    balancer = _start("ab", _plainly())
    a, b = balancer.ready
    ours = [balancer.acquire(_main(50_000, b"%d" % n, failed=(b,)), 1.0) for n in range(3)]
    balancer.report(a, Load(at=1.0, running=0, waiting=0, waiting_tokens=0), 1.0)
    balancer.report(b, Load(at=1.0, running=1, waiting=1, waiting_tokens=20_000), 1.0)
    assert balancer.explain(_main(key=b"new"), 2.0).replica is b, "a says it is idle, but three of ours are on the way"
    balancer.report(b, Load(at=2.0, running=9, waiting=9, waiting_tokens=900_000), 2.0)
    balancer.report(b, Load(at=2.1, running=9, waiting=9, waiting_tokens=900_000), 2.1)
    assert balancer.explain(_main(key=b"new"), 2.2).replica is a, "others keep b busier than ours keep a"
    assert a.in_flight == len(ours)


def test_an_old_report_is_neither_load_nor_idleness() -> None:
    balancer = _start("ab")
    a, b = balancer.ready
    balancer.report(a, Load(at=1.0, running=50, waiting=50, waiting_tokens=10**6), 1.0)
    fresh, stale = 2.0, 2.1 + REPORT_MAX_AGE_S
    keys = [b"%d" % n for n in range(50)]
    assert {balancer.explain(_main(key=k), fresh).replica for k in keys} == {b}
    assert {balancer.explain(_main(key=k), stale).replica for k in keys} == {a, b}
    balancer.report(a, Load(at=stale, running=0, waiting=0, waiting_tokens=0), stale)
    _busy(balancer, a, stale + 200.0, stale)
    much_later = stale + 10 * REPORT_MAX_AGE_S
    assert {balancer.explain(_main(key=k), much_later).replica for k in keys} == {b}


def test_what_others_keep_busy_may_be_left_too() -> None:
    balancer = _start("ab", _plainly())
    home = _live(balancer, _main(20_000), 0.0)
    for at in (9.0, 10.0):
        balancer.report(home, Load(at=at, running=9, waiting=9, waiting_tokens=300_000), at)
    assert balancer.explain(_main(21_000), 10.0).reason is Reason.MOVED
    assert balancer.explain(_main(21_000), 10.0 + 2 * REPORT_MAX_AGE_S).reason is Reason.HOME


def test_a_fleet_drowned_in_bad_figures_still_serves() -> None:
    balancer, nan = _start(), float("nan")
    for replica in balancer.ready:
        load = Load(
            at=1.0,
            running=10**9,
            waiting=10**9,
            waiting_tokens=10**15,
            capacity_tokens=-5,
            host_capacity_tokens=0,
            prefill_tokens_per_s=nan,
        )
        balancer.report(replica, load, 1.0)
    for request in (_main(10**15), Request(prompt_tokens=10**15), Request()):
        lease = balancer.acquire(request, 1.0)
        assert lease.replica in balancer.ready
        assert lease.choice.wait_s >= 0.0


def test_requests_without_a_session_go_by_load_and_take_turns_when_equal() -> None:
    balancer = _start()
    leases = [balancer.acquire(Request(prompt_tokens=5_000), 1.0) for _ in range(9)]
    assert {lease.choice.reason for lease in leases} == {Reason.NO_SESSION}
    assert [r.in_flight for r in balancer.ready] == [3, 3, 3]
    for lease in leases:
        lease.finish(DONE, None, 2.0)
    assert len(balancer.directory) == 0
    assert {turn(balancer, Request(), 3.0 + n).replica.id for n in range(3)} == {"a", "b", "c"}


# 3. It is aware of what is resident, by branch


def test_conversations_of_one_session_each_return_to_their_own_home() -> None:
    balancer = _start("ab")
    _live(balancer, Request(b"k", None, MAIN, 900), 1.0, on="a")
    _live(balancer, Request(b"k", None, TITLE, 50), 2.0, on="b")
    for _ in range(2):
        assert balancer.explain(Request(b"k", None, MAIN, 1_000), 3.0).replica.id == "a"
        assert balancer.explain(Request(b"k", None, TITLE, 60), 3.0).replica.id == "b"


def test_another_conversation_of_the_session_is_not_thought_resident() -> None:
    balancer = _start()
    _live(balancer, _main(), 1.0)
    choice = balancer.explain(Request(b"k", None, UNHEARD_OF, 60_000), 5.0)
    assert choice.resident_tokens == 0
    assert choice.prefill_s == Speed().prefill_s(60_000, 0)


def test_a_session_that_begins_anew_stays_while_that_costs_next_to_nothing() -> None:
    """Compaction, or a client without history: what its tools and system prompt left there may still serve."""
    balancer = _start(policy=_plainly())
    home = _live(balancer, _main(), 1.0)
    anew = Request(b"k", None, UNHEARD_OF, 20_000)
    choice = balancer.explain(anew, 10.0)
    assert (choice.replica, choice.reason) == (home, Reason.HOME)
    _busy(balancer, home, 10.0 + 1.1, 10.0)
    assert balancer.explain(anew, 10.0).replica is not home
    assert balancer.explain(anew, 10.0).reason is Reason.NEW


def test_a_session_pushed_out_by_later_ones_is_placed_anew() -> None:
    balancer = _start("ab")
    for replica in balancer.ready:
        replica.cache.resize(400_000, None)
    home = _live(balancer, _main(100_000), 0.0)
    later = 10.0
    while balancer.explain(_main(100_000), later).reason is Reason.HOME:
        later += 1.0
        _live(balancer, _main(50_000, b"%f" % later), later, on=home.id)
    assert (later - 10.0) * 50_000 >= 400_000, "not before its replica's capacity was used by others"
    assert (later - 10.0) * 50_000 <= 400_000 * HEADROOM + 100_000
    choice = balancer.explain(_main(100_000), later)
    assert (choice.replica is home, choice.reason, choice.resident_tokens) == (False, Reason.EVICTED, 0)


def test_what_fell_out_of_gpu_memory_is_resident_in_the_host_tier() -> None:
    balancer = _start("ab")
    for replica in balancer.ready:
        replica.cache.resize(200_000, 2_000_000)
    home = _live(balancer, _main(100_000), 0.0)
    in_gpu = balancer.explain(_main(101_000), 10.0)
    for n in range(8):
        _live(balancer, _main(100_000, b"%d" % n), 20.0 + n, on=home.id)
    in_host = balancer.explain(_main(101_000), 100.0)
    assert (in_gpu.replica, in_host.replica, in_host.reason) == (home, home, Reason.HOME)
    assert in_gpu.resident_tokens == in_host.resident_tokens == 100_100
    assert 0.05 < in_host.prefill_s - in_gpu.prefill_s < 0.5, "it is loaded back"


def test_a_replica_that_does_not_tell_its_capacity_is_not_thought_small() -> None:
    balancer = _start("a")
    for n in range(8):
        _live(balancer, _main(100_000, b"%d" % n), 10.0 * n)
    assert balancer.explain(_main(100_000, b"0"), 100.0).resident_tokens == 100_000


def test_a_session_idle_for_long_is_new() -> None:
    balancer = _start(directory=Directory(idle_s=3600.0))
    _live(balancer, _main(), 0.0)
    assert balancer.explain(_main(), 3500.0).reason is Reason.HOME
    assert balancer.explain(_main(), 3602.0).reason is Reason.NEW


def test_a_client_that_left_early_still_has_its_home() -> None:
    balancer = _start()
    lease = balancer.acquire(_main(), 1.0)
    lease.first_token(1.5)
    lease.finish(CLIENT_LEFT, None, 2.0)
    choice = balancer.explain(_main(), 3.0)
    assert (choice.replica, choice.reason) == (lease.replica, Reason.HOME)


def test_an_engine_that_reports_no_usage_is_believed_to_hold_the_prompt_it_answered() -> None:
    """Engines leave usage out of streams unless asked; else every turn would count as a full prefill."""
    balancer = _start()
    lease = balancer.acquire(_main(50_000), 1.0)
    lease.first_token(1.5)
    lease.finish(DONE, None, 2.0)
    assert balancer.explain(_main(51_000), 3.0).resident_tokens == 50_000


def _eject(balancer: Balancer, home: Replica) -> None:
    balancer.set_state(home, State.EJECTED, 10.0)


def _drain(balancer: Balancer, home: Replica) -> None:
    balancer.set_state(home, State.DRAINING, 10.0)


def _leave(balancer: Balancer, home: Replica) -> None:
    balancer.leave(home.id, 10.0)


def _rejoin(balancer: Balancer, home: Replica) -> None:
    balancer.leave(home.id, 10.0)
    balancer.join(Replica(home.id), 11.0)


def _replace(balancer: Balancer, home: Replica) -> None:
    balancer.join(Replica(home.id), 11.0)


def _clear(balancer: Balancer, home: Replica) -> None:
    balancer.cache_cleared(home, 10.0)


@pytest.mark.parametrize("lose", [_eject, _drain, _leave, _rejoin, _replace, _clear])
def test_a_lost_home_is_said_to_be_lost(lose: Callable[[Balancer, Replica], None]) -> None:
    balancer = _start()
    home = _live(balancer, _main(), 1.0)
    lose(balancer, home)
    choice = balancer.explain(_main(), 12.0)
    assert (choice.reason, choice.resident_tokens) == (Reason.HOME_LOST, 0)
    assert choice.replica in balancer.ready
    fork = balancer.explain(_main(blocks=_chain(1, 50)), 12.0)
    assert fork.reason is Reason.HOME_LOST, "its forks have lost it too"
    assert balancer.explain(_main(key=b"another"), 12.0).reason is Reason.NEW


@pytest.mark.parametrize("lose", [_eject, _drain, _leave, _rejoin, _replace, _clear])
def test_after_the_loss_the_session_settles_again(lose: Callable[[Balancer, Replica], None]) -> None:
    balancer = _start()
    home = _live(balancer, _main(), 1.0)
    lose(balancer, home)
    first = turn(balancer, _main(), 12.0)
    second = turn(balancer, _main(), 20.0)
    assert first.choice.reason is Reason.HOME_LOST
    assert (second.choice.reason, second.replica) == (Reason.HOME, first.replica)


def test_a_home_ejected_for_a_moment_is_home_again() -> None:
    balancer = _start()
    home = _live(balancer, _main(), 1.0)
    balancer.set_state(home, State.EJECTED, 10.0)
    balancer.set_state(home, State.READY, 20.0)
    choice = balancer.explain(_main(), 21.0)
    assert (choice.replica, choice.reason) == (home, Reason.HOME)


def test_a_home_that_just_failed_is_passed_over_and_the_session_moves() -> None:
    balancer = _start()
    home = _live(balancer, _main(), 1.0)
    request = _main()
    first = balancer.acquire(request, 10.0)
    first.finish(REFUSED, None, 10.1)
    request.failed = (first.replica,)
    second = balancer.acquire(request, 10.1)
    assert first.replica is home
    assert second.replica is not home
    assert second.choice.reason is Reason.HOME_LOST
    _answer(second, 11.0)
    assert balancer.explain(_main(50_200), 12.0).replica is second.replica


def test_an_answer_from_a_replica_that_was_replaced_says_nothing_of_its_successor() -> None:
    """The old process held the tokens; the new one, under the same id, is empty."""
    balancer = _start("a")
    lease = balancer.acquire(_main(), 1.0)
    balancer.join(Replica("a"), 2.0)
    lease.finish(DONE, Usage(50_000, 0, 100), 3.0)
    choice = balancer.explain(_main(60_000), 4.0)
    assert (choice.reason, choice.resident_tokens) == (Reason.HOME_LOST, 0)


_lives = st.lists(
    st.one_of(
        st.tuples(st.just("open"), st.integers(1, 2), st.none()),
        st.tuples(st.just("close"), st.integers(0, 9), st.none() | st.integers(1, 90_000)),
        st.tuples(st.just("replace"), st.sampled_from("ab"), st.none()),
        st.tuples(st.just("clear"), st.sampled_from("ab"), st.none()),
    ),
    max_size=25,
)


@given(_lives)
@settings(max_examples=200)
def test_nothing_is_believed_resident_that_was_not_sent_there_since_its_cache_was_empty(
    steps: list[tuple[str, int | str, int | None]],
) -> None:
    balancer, now = _start("ab"), 0.0
    leases: list[Lease] = []
    sent: dict[tuple[Replica, int], int] = {}
    for verb, what, tokens in steps:
        now += 1.0
        if verb == "open":
            lease = balancer.acquire(Request(b"k", None, int(what), 40_000), now)
            place = lease.replica, lease.request.fingerprint
            assert lease.choice.resident_tokens <= sent.get(place, 0)
            sent[place] = max(sent.get(place, 0), lease.request.prompt_tokens)
            leases.append(lease)
        elif verb == "close" and leases:
            lease = leases.pop(int(what) % len(leases))
            if tokens is None:
                lease.finish(REFUSED, None, now)
            else:
                lease.finish(DONE, Usage(tokens, 0, 0), now)
                place = lease.replica, lease.request.fingerprint
                sent[place] = max(sent.get(place, 0), tokens)
        elif verb == "replace":
            balancer.join(Replica(str(what)), now)
        elif verb == "clear":
            replica = balancer.replicas[str(what)]
            balancer.cache_cleared(replica, now)
            sent = {place: n for place, n in sent.items() if place[0] is not replica}


# 4. Fleets that grow, shrink, crash and come back


def _populate(balancer: Balancer, sessions: int, seed: int) -> tuple[dict[bytes, tuple[Replica, int]], float]:
    """Sessions of random sizes, each resident somewhere; where, of what size, and the time."""
    random, now = Random(seed), 0.0
    homes: dict[bytes, tuple[Replica, int]] = {}
    for n in range(sessions):
        now += random.expovariate(2.0)
        key, tokens = b"%d.%d" % (seed, n), random.randrange(5_000, 180_000)
        homes[key] = _live(balancer, _main(tokens, key), now), tokens
    return homes, now


def _loaded(balancer: Balancer, now: float, seed: int) -> list[Lease]:
    """Strangers' requests under way and reports of others, here more and there less."""
    random = Random(seed)
    leases: list[Lease] = []
    old = balancer.ready
    for replica in old:
        others = tuple(r for r in old if r is not replica)
        for n in range(random.randrange(4)):
            request = _main(random.randrange(2_000, 90_000), b"stranger %d" % n, failed=others)
            leases.append(balancer.acquire(request, now))
        if random.random() < 0.5:
            load = Load(at=now, running=random.randrange(20), waiting_tokens=random.randrange(200_000))
            balancer.report(replica, load, now)
    return leases


FLEET = [f"r{n:02}" for n in range(16)]


def _large(policy: SessionAffinity | None = None, ids: list[str] = FLEET) -> Balancer:
    balancer = Balancer(policy or SessionAffinity())
    for replica_id in ids:
        balancer.join(Replica(replica_id), 0.0)
        balancer.replicas[replica_id].cache.resize(690_000, 5_700_000)
    return balancer


@pytest.mark.parametrize("seed", range(4))
def test_scale_out_sends_none_that_is_resident_elsewhere_to_a_new_replica(seed: int) -> None:
    balancer = _large()
    homes, now = _populate(balancer, 320, seed)
    _loaded(balancer, now, seed)
    new = [Replica(f"new{n}") for n in range(4)]
    for replica in new:
        balancer.join(replica, now + 0.1)
    random = Random(seed)
    for key, (_, tokens) in homes.items():
        now += 0.2
        request = _main(tokens + random.randrange(3_000), key)
        lease = balancer.acquire(request, now)
        assert request.residents
        assert lease.replica not in new
        if random.random() < 0.8:
            _answer(lease, now + 0.01)
        if random.random() < 0.1:
            fork = balancer.acquire(_main(tokens, key), now)
            assert fork.replica not in new
            _answer(fork, now + 0.01)


def test_without_grace_busy_homes_do_send_sessions_to_new_replicas() -> None:
    """The proof that the test above could fail."""
    balancer = _large(_policy(grace_s=0.0))
    homes, now = _populate(balancer, 320, 0)
    for replica in balancer.ready:
        replica.prefill_ends = now + 30.0
    new = [Replica(f"new{n}") for n in range(4)]
    for replica in new:
        balancer.join(replica, now + 0.1)
    sent = [balancer.explain(_main(tokens, key), now + 0.2).replica for key, (_, tokens) in homes.items()]
    assert any(replica in new for replica in sent)


def test_grace_ends() -> None:
    balancer = _start("ab", _plainly(grace_s=300.0))
    home = _live(balancer, _main(20_000), 0.0)
    new = Replica("c")
    balancer.join(new, 100.0)
    for replica in balancer.replicas.values():
        _busy(balancer, replica, 1_000.0 if replica is not new else 0.0, 100.0)
    assert balancer.explain(_main(20_000), 399.0).replica is home
    choice = balancer.explain(_main(20_000), 401.0)
    assert (choice.replica, choice.reason) == (new, Reason.MOVED)


def test_new_sessions_fill_the_new_replicas_until_level() -> None:
    balancer = _large()
    _, now = _populate(balancer, 320, 1)
    old = balancer.ready
    new = [Replica(f"new{n}") for n in range(4)]
    for replica in new:
        balancer.join(replica, now + 0.1)
        replica.cache.resize(690_000, 5_700_000)
    random = Random(9)

    def live(replicas: Sequence[Replica]) -> float:
        return sum(r.cache.live(now) for r in replicas) / len(replicas)

    placed: list[Replica] = []
    for n in range(240):
        now += 3.0
        placed.append(_live(balancer, _main(random.randrange(5_000, 180_000), b"fresh %d" % n), now))
        if n == 29:
            assert all(replica in new for replica in placed)
            assert live(new) < 0.7 * live(old)
            assert max(Counter(r.id for r in placed).values()) <= 15, "all of them"
    # Level in seconds: what an emptier cache is worth is outweighed by what newcomers cost each other.
    assert 0.7 * live(old) <= live(new) <= 1.1 * live(old)
    assert sum(replica in old for replica in placed[-60:]) >= 30


def _depart(balancer: Balancer, replica: Replica, now: float, leases: list[Lease]) -> None:
    """It crashes: its streams break, it is ejected, and then gone."""
    for lease in leases:
        if lease.replica is replica and not lease.finished:
            lease.finish(REFUSED, None, now)
    balancer.set_state(replica, State.EJECTED, now)
    balancer.leave(replica.id, now)


@pytest.mark.parametrize("crash", [False, True], ids=["scale-in", "crash"])
@pytest.mark.parametrize("seed", range(3))
def test_of_a_fleet_that_shrinks_only_the_lost_replicas_sessions_move_and_are_spread(seed: int, crash: bool) -> None:
    balancer = _large()
    homes, now = _populate(balancer, 320, seed)
    gone = balancer.replicas["r05"]
    if crash:
        _depart(balancer, gone, now, [balancer.acquire(_main(9_000, b"stream", failed=balancer.ready[:5]), now)])
    else:
        balancer.set_state(gone, State.DRAINING, now)
        balancer.leave("r05", now + 1.0)
    lost = [key for key, (home, _) in homes.items() if home is gone]
    assert len(lost) >= 12
    now += 60.0
    spread: list[Lease] = []
    for key in lost:  # all at once: nobody knows yet how the others are served
        lease = balancer.acquire(_main(homes[key][1], key), now)
        assert lease.choice.reason is Reason.HOME_LOST
        spread.append(lease)
    assert max(Counter(lease.replica.id for lease in spread).values()) <= ceil(len(lost) / 15) + 2
    waits = [r.pending_s for r in balancer.ready]
    assert max(waits) <= sum(waits) / len(waits) + 15.0
    for lease in spread:
        _answer(lease, now + 30.0)
    now += 60.0
    for key, (home, tokens) in homes.items():
        if key not in lost:
            lease = _answer(balancer.acquire(_main(tokens + 500, key), now), now + 0.1)
            now += 0.5
            assert (lease.replica, lease.choice.reason) == (home, Reason.HOME)


def test_a_replica_that_comes_back_is_not_flooded() -> None:
    balancer = _large()
    homes, now = _populate(balancer, 320, 2)
    _depart(balancer, balancer.replicas["r05"], now, [])
    back = Replica("r05")
    balancer.join(back, now + 5.0)
    back.cache.resize(690_000, 5_700_000)
    now += 10.0
    leases: list[Lease] = []
    for n, (key, (home, tokens)) in enumerate(homes.items()):  # all its former sessions among them
        if home.id == "r05" or n % 4 == 0:
            lease = balancer.acquire(_main(tokens, key), now)
            assert lease.replica is not back or home.id == "r05", "others have nothing to seek there"
            leases.append(lease)
    for n in range(60):
        leases.append(balancer.acquire(_main(30_000, b"fresh %d" % n), now))
    pending = {r.id: r.pending_s for r in balancer.ready}
    # Its empty cache is worth no more than theta; beyond that it waits like the others.
    assert pending.pop("r05") <= max(pending.values()) + SessionAffinityConfig().theta_s
    assert back.in_flight <= 0.25 * len(leases)


def test_a_flushed_replica_gets_new_sessions_but_no_other_replicas() -> None:
    balancer = _start("abcd")
    for n in range(16):
        _live(balancer, _main(100_000, b"%d" % n), 10.0 * n)
    balancer.cache_cleared(balancer.replicas["b"], 500.0)
    for n in range(16):
        choice = balancer.explain(_main(100_500, b"%d" % n), 510.0)
        (home,) = _homes(balancer, b"%d" % n)
        assert choice.reason is (Reason.HOME_LOST if home.replica.id == "b" else Reason.HOME)
    assert {balancer.explain(_main(key=b"new %d" % n), 510.0).replica.id for n in range(30)} == {"b"}


# 5. Forks


def _forked(balancer: Balancer, tokens: int = 100_000) -> Replica:
    """A main thread whose conversation is resident somewhere, and idle."""
    return _live(balancer, _main(tokens, blocks=_chain(1, tokens // 1000)), 0.0)


def _fork(n: int, own_blocks: int = 8, common: int = 96) -> Request:
    """The `n`th fork of it: as the main thread to block 96, then its own."""
    blocks = common + own_blocks
    return _main(1000 * blocks, blocks=_chain(1, blocks, common, n + 1))


def test_forks_stay_until_waiting_costs_more_than_prefilling_again_and_then_split() -> None:
    balancer = _start("abc", _plainly())
    home = _forked(balancer)
    leases: list[Lease] = []
    for n in range(12):
        leases.append(balancer.acquire(_fork(n), 10.0))
    again_s = Speed().prefill_s(104_000, 0)
    for n, lease in enumerate(leases):
        choice = lease.choice
        stays_s = sum(before.choice.prefill_s for before in leases[:n] if before.replica is home)
        if stays_s + Speed().prefill_s(8_000, 96_000) <= again_s:
            assert (choice.replica, choice.reason) == (home, Reason.HOME)
        if choice.replica is not home:
            assert stays_s > again_s - 2.0
    split = [lease for lease in leases if lease.replica is not home]
    assert split, "twelve at once are too many for one replica"
    assert split[0].choice.reason is Reason.SPLIT
    assert leases.index(split[0]) >= 4
    assert all(lease.choice.reason in (Reason.HOME, Reason.SPLIT) for lease in leases)


@given(st.integers(20_000, 200_000), st.floats(0.05, 1.0), st.floats(0.0, 60.0))
def test_a_fork_splits_exactly_when_it_finishes_sooner_elsewhere(prompt: int, share: float, wait: float) -> None:
    a, b = Replica("a", prefill_ends=wait, in_flight=1), Replica("b")
    held = int(prompt * share)
    request = _main(prompt, residents=(Resident(a, held, held, own=False),), known=True, concurrent=True)
    choice = _plainly(hysteresis_s=0.5).pick(request, [a, b], 0.0)
    speed = Speed()
    saved_s = speed.prefill_s(prompt, 0) - speed.prefill_s(prompt - held, held)
    assume(abs(wait - saved_s - 0.5) > 1e-6)
    expected = (b, Reason.SPLIT) if wait > saved_s + 0.5 else (a, Reason.HOME)
    assert (choice.replica, choice.reason) == expected


def test_a_forks_next_turn_goes_to_the_forks_home() -> None:
    balancer = _start("abc")
    home = _forked(balancer)
    _busy(balancer, home, 100.0, 10.0)
    main = balancer.acquire(_main(101_000, blocks=_chain(1, 101), failed=tuple({*balancer.ready} - {home})), 10.0)
    fork = balancer.acquire(_fork(1), 10.0)
    assert (fork.choice.reason, fork.replica is home) == (Reason.SPLIT, False)
    _answer(fork, 20.0)
    _answer(main, 100.0)
    for n in range(3):
        lease = _answer(balancer.acquire(_fork(1, 10 + n), 110.0 + 10 * n), 115.0 + 10 * n)
        assert (lease.replica, lease.choice.reason) == (fork.replica, Reason.HOME)
        assert lease.choice.resident_tokens > 100_000


@pytest.mark.parametrize("blocks", [True, False], ids=["blocks", "no blocks"])
def test_the_main_thread_returns_to_its_own_home_not_to_a_forks(blocks: bool) -> None:
    """Also when forks of the same fingerprint were placed elsewhere, were used later and grew longer."""
    balancer = _start("abcd")
    home = _live(balancer, _main(100_000, blocks=_chain(1, 100) if blocks else ()), 0.0)
    main = balancer.acquire(_main(101_000, blocks=_chain(1, 101) if blocks else ()), 10.0)
    assert main.replica is home
    others = [r for r in balancer.ready if r is not home]
    forks = []
    for n, replica in enumerate(others):
        request = _fork(n, 60) if blocks else _main(160_000)
        request.failed = tuple(r for r in balancer.ready if r is not replica)
        forks.append(balancer.acquire(request, 11.0 + n))
    assert {lease.replica for lease in forks} == set(others)
    _answer(main, 20.0)
    for lease in forks:
        _answer(lease, 30.0)
    back = balancer.acquire(_main(102_000, blocks=_chain(1, 102) if blocks else ()), 40.0)
    assert (back.replica, back.choice.reason) == (home, Reason.HOME)
    assert back.choice.resident_tokens >= 101_000


def test_fresh_subagents_go_to_the_cheapest_replica_at_once() -> None:
    balancer = _start("abcd")
    home = _forked(balancer)
    main = balancer.acquire(_main(101_000, blocks=_chain(1, 101)), 10.0)
    assert main.replica is home
    agents = [balancer.acquire(Request(b"k", None, UNHEARD_OF + n, 30_000, _chain(5 + n, 30)), 10.0) for n in range(3)]
    assert {lease.choice.reason for lease in agents} == {Reason.NEW}
    assert {lease.replica for lease in agents} == set(balancer.ready) - {home}
    for lease in (main, *agents):
        _answer(lease, 15.0)
    main = balancer.acquire(_main(102_000, blocks=_chain(1, 102)), 1e5)
    named = [balancer.acquire(Request(b"agent%d" % n, b"k", 70 + n, 30_000, _chain(50 + n, 30)), 1e5) for n in range(3)]
    assert {lease.replica for lease in named} == set(balancer.ready) - {home}
    assert {lease.choice.reason for lease in named} == {Reason.NEW}


@pytest.mark.parametrize("blocks", [True, False], ids=["blocks", "no-blocks"])
def test_a_main_thread_that_waited_idly_for_a_fork_returns_to_its_own_home(blocks: bool) -> None:
    """The fork comes while nothing is under way, so it looks like the main thread's next turn."""
    balancer = _start("abc", _plainly(hysteresis_s=1.0))
    home = _forked(balancer)

    def fork(n: int) -> Request:
        own = 10 + 4 * n
        return _main(1000 * (100 + own), blocks=_chain(1, 100 + own, 100, 1) if blocks else ())

    _busy(balancer, home, 60.0, 9.9)
    away = _live(balancer, fork(0), 10.0)
    assert away is not home
    _busy(balancer, home, 0.0, 20.0)
    for n in range(1, 4):
        assert _live(balancer, fork(n), 10.0 + 10.0 * n) is away
    for n in range(4, 8):
        main = _main(1000 * (98 + n), blocks=_chain(1, 98 + n) if blocks else ())
        assert balancer.explain(main, 10.0 * n + 15.0).reason is Reason.HOME
        assert _live(balancer, main, 10.0 * n + 15.0) is home
        if blocks:
            assert _live(balancer, fork(n), 10.0 * n + 20.0) is away


def test_a_fresh_subagent_does_not_follow_the_main_thread_that_is_under_way() -> None:
    """Though it would cost little there: of several that come at once each must go its own way."""
    balancer = _start("abcd", _plainly(theta_s=4.0))
    home = _live(balancer, _main(20_000), 0.0)
    agent = Request(b"k", None, UNHEARD_OF, 10_000)
    assert balancer.explain(agent, 10.0).replica is home, "nothing is under way: the session begins anew"
    main = balancer.acquire(_main(20_200), 10.0)
    assert main.replica is home
    choice = balancer.explain(agent, 10.0)
    assert (choice.replica is home, choice.reason) == (False, Reason.NEW)


def test_a_subagent_with_its_parents_beginning_goes_where_that_is() -> None:
    balancer = _start("abcd")
    home = _forked(balancer)
    request = _fork(1)
    request.key, request.parent = b"child", b"k"
    choice = balancer.explain(request, 10.0)
    assert (choice.replica, choice.reason, choice.resident_tokens) == (home, Reason.HOME, 96_000)
    _busy(balancer, home, 60.0, 10.0)
    assert balancer.explain(request, 10.0).reason is Reason.MOVED
    balancer.acquire(_main(101_000, blocks=_chain(1, 101)), 10.0)
    assert balancer.explain(request, 10.0).reason is Reason.SPLIT, "its parent is under way"


def test_the_beginning_that_forks_share_takes_room_once() -> None:
    """However often each of them is used: not several times, and not never."""
    balancer = _start("a")
    (a,) = balancer.ready
    _forked(balancer)
    now = 10.0
    for round_ in range(4):
        main = balancer.acquire(_main(101_000 + round_, blocks=_chain(1, 101)), now)
        forks = [balancer.acquire(_fork(n, 12), now) for n in range(3)]
        for lease in (main, *forks):
            _answer(lease, now + 1.0, completion=0)
        now += 10.0
        own, common = 3 * 12_000 + 5_000, 96_000
        assert own + common - 5_000 <= a.cache.held_tokens <= own + common + 25_000


# 6. The stateless floor


@given(st.integers(1, 12), st.binary(min_size=1, max_size=16), st.integers(0, 200_000))
def test_routers_that_know_nothing_agree_on_the_order_of_rendezvous(size: int, key: bytes, tokens: int) -> None:
    ids = [f"http://10.0.0.{n}:30000" for n in range(size)]
    one, other = Balancer(SessionAffinity()), Balancer(SessionAffinity())
    for replica_id in ids:
        one.join(Replica(replica_id), 3.0)
    for replica_id in reversed(ids):
        other.join(Replica(replica_id), 700.0)
    chosen = one.explain(_main(tokens, key), 5.0).replica
    assert other.explain(_main(tokens, key), 900.0).replica.id == chosen.id
    assert chosen is rendezvous(key, one.ready)


def test_routers_that_know_nothing_agree_for_a_thousand_sessions_and_spread_them() -> None:
    one, other = _start("abcdefgh"), _start("hgfedcba")
    choices = [one.explain(_main(key=b"%d" % n), 1.0).replica.id for n in range(1000)]
    assert choices == [other.explain(_main(key=b"%d" % n), 1.0).replica.id for n in range(1000)]
    assert set(choices) == set("abcdefgh")


def test_rendezvous_order_is_bounded_by_load() -> None:
    """All of these keys rank the same replica first; it gets no more than its share."""
    balancer = _start("abcd")
    keys = [k for k in (b"%d" % n for n in range(400)) if rendezvous(k, balancer.ready).id == "a"][:40]
    leases = [balancer.acquire(_main(30_000, key), 1.0) for key in keys]
    assert Counter(lease.replica.id for lease in leases) == dict.fromkeys("abcd", 10)


def test_ties_within_a_millisecond_are_settled_by_rendezvous_among_the_near_only() -> None:
    balancer = _start("")
    for replica in (a := Replica("a"), b := Replica("b", prefill_ends=1.0005), Replica("c", prefill_ends=1.002)):
        balancer.join(replica, 0.0)
    chosen = set()
    for n in range(200):
        key = b"%d" % n
        choice = balancer.explain(_main(key=key), 1.0)
        assert choice.replica is rendezvous(key, [a, b])
        chosen.add(choice.replica)
    assert chosen == {a, b}


# 7. Replicas of different speed and size


def _served(lease: Lease, factor: float, now: float) -> None:
    """By an engine of that speed that was idle."""
    prompt, held = lease.request.prompt_tokens, lease.choice.resident_tokens
    speed = Speed()
    speed.factor = factor
    first = now + speed.prefill_s(prompt - held, held)
    lease.first_token(first)
    lease.finish(DONE, Usage(prompt, held, 50), first + 1.0)


def test_each_replica_is_weighed_by_the_speed_it_was_seen_to_have() -> None:
    balancer = _start("ab", _plainly())
    fast, slow = balancer.ready
    for replica, factor in ((fast, 0.5), (slow, 3.0)):
        replica.reports_cached = True
        for n in range(10):
            others = tuple(r for r in balancer.ready if r is not replica)
            _served(
                balancer.acquire(_main(40_000, b"%s%d" % (replica.id.encode(), n), failed=others), 100.0 * n),
                factor,
                100.0 * n,
            )
    assert fast.speed.factor == pytest.approx(0.5, rel=0.05)
    assert slow.speed.factor == pytest.approx(3.0, rel=0.05)
    leases = [balancer.acquire(_main(40_000, b"new%d" % n), 5_000.0) for n in range(14)]
    placed = Counter(lease.replica.id for lease in leases)
    assert placed == {"a": 12, "b": 2}, "six to one, as they are fast"
    waits = [cost.expected_wait(r, 5_000.0) for r in balancer.ready]
    assert abs(waits[0] - waits[1]) <= slow.speed.prefill_s(40_000, 0)


def test_a_replica_that_turns_out_faster_is_considered_at_once() -> None:
    balancer = _start("ab", _plainly())
    home = _live(balancer, _main(50_000), 0.0, on="a")
    other = balancer.replicas["b"]
    _busy(balancer, home, 12.0, 10.0)
    assert balancer.explain(_main(50_000), 10.0).replica is home, "2 s of waiting against 2.8 s of prefill"
    balancer.report(other, Load(at=10.1, prefill_tokens_per_s=10**6), 10.1)
    choice = balancer.explain(_main(50_000), 10.1)
    assert (choice.replica, choice.reason) == (other, Reason.MOVED)


def test_a_replica_whose_first_answer_was_late_gets_its_share_again() -> None:
    """It warmed up. Were it taken at its word, no request would come that could show better."""
    balancer = _start("abc")
    for replica in balancer.ready:
        replica.reports_cached = True
    late = balancer.acquire(_main(30_000, b"late"), 0.0)
    _served(late, 60.0, 0.0)
    for n in range(100):
        lease = balancer.acquire(_main(30_000, b"%d" % n), 200.0 + 10.0 * n)
        _served(lease, 1.0, 200.0 + 10.0 * n)
    assert late.replica.served >= 25
    assert late.replica.speed.factor == pytest.approx(1.0, rel=0.1)


def test_a_session_leaves_a_slow_home_sooner() -> None:
    a, b = Replica("a", prefill_ends=2.0), Replica("b")
    request = _main(30_000, residents=(Resident(a, 10_000, 10_000),), known=True)
    policy = _plainly(hysteresis_s=0.0)
    a.speed.factor = 0.5
    assert policy.pick(request, [a, b], 0.0).replica is b
    b.speed.factor = 5.0
    assert _plainly(hysteresis_s=0.0).pick(request, [a, b], 0.0).replica is a


def test_a_replica_twice_as_large_gets_twice_the_sessions() -> None:
    balancer = _start("abc")
    for replica, tokens in zip(balancer.ready, (1_000_000, 1_000_000, 2_000_000), strict=True):
        replica.cache.resize(tokens, None)
    for n in range(40):
        _live(balancer, _main(50_000, b"%d" % n), 20.0 * n)
    held = [replica.cache.held_tokens for replica in balancer.ready]
    assert held[2] == pytest.approx(2 * (held[0] + held[1]) / 2, rel=0.15)


def test_a_replica_of_half_the_weight_gets_half_the_sessions() -> None:
    balancer = Balancer(SessionAffinity())
    for replica_id, weight in (("a", 1.0), ("b", 0.5)):
        balancer.join(Replica(replica_id, weight=weight), 0.0)
    for n in range(30):
        _live(balancer, _main(20_000, b"%d" % n), 20.0 * n)
    held = [replica.cache.held_tokens for replica in balancer.ready]
    assert held[0] == pytest.approx(2 * held[1], rel=0.15)


# Explaining


def test_an_explanation_tells_the_seconds_term_by_term() -> None:
    balancer = _start("abcdefghijkl", _policy(spread_s=0.5))
    home = _live(balancer, _main(100_000), 0.0)
    balancer.acquire(_main(60_000, b"neighbour", failed=tuple(r for r in balancer.ready if r is not home)), 10.0)
    choice = balancer.explain(_main(104_000), 10.5)
    assert choice.replica is home
    assert len(choice.candidates) <= 8
    shown = {candidate.replica: candidate for candidate in choice.candidates}
    here: Candidate = shown[home]
    assert here.terms["queue"] == pytest.approx(choice.wait_s)
    assert here.terms["prefill"] == pytest.approx(choice.prefill_s)
    assert here.terms["neighbours"] > 0.0
    assert here.terms["arrivals"] > 0.0
    assert here.terms["spread"] == 0.5
    assert here.terms["crowding"] == 0.0, "it lives there already"
    there = next(candidate for replica, candidate in shown.items() if replica is not home)
    assert there.terms["prefill"] == pytest.approx(Speed().prefill_s(104_000, 0))
    assert there.cost > here.cost
    costs = [candidate.cost for candidate in choice.candidates]
    assert costs == sorted(costs)


def test_a_choice_says_what_it_expects() -> None:
    balancer = _start("a")
    first = balancer.acquire(_main(50_000), 1.0).choice
    second: Choice = balancer.acquire(_main(20_000, b"other"), 1.0).choice
    assert (first.wait_s, first.prefill_s) == (0.0, Speed().prefill_s(50_000, 0))
    assert (second.wait_s, second.prefill_s) == pytest.approx((first.prefill_s, Speed().prefill_s(20_000, 0)))
    assert first.prefill_s > 50_000 * PER_TOKEN_S


# Other policies in between


@pytest.mark.parametrize("between", [name for name in POLICIES if name != "session_affinity"])
def test_homes_outlive_a_switch_of_policy(between: str) -> None:
    balancer = _start()
    homes = {key: turn(balancer, _main(1_000, key), 1.0).replica for key in (b"%d" % n for n in range(30))}
    balancer.switch(make(between), 10.0)
    for n in range(5):
        turn(balancer, Request(), 11.0 + n)
    balancer.switch(SessionAffinity(), 20.0)
    for key, home in homes.items():
        choice = balancer.explain(_main(1_000, key), 21.0)
        assert (choice.replica, choice.reason) == (home, Reason.HOME)


def test_sessions_placed_by_another_policy_are_at_home_where_it_put_them() -> None:
    balancer = fleet(make("round_robin"))
    homes = {
        key: turn(balancer, Request(key, prompt_tokens=1_000), 1.0).replica for key in (b"%d" % n for n in range(9))
    }
    balancer.switch(SessionAffinity(), 10.0)
    for key, home in homes.items():
        choice = balancer.explain(_main(1_000, key), 11.0)
        assert (choice.replica, choice.reason) == (home, Reason.HOME)


def test_the_policy_itself_remembers_no_session() -> None:
    """Homes come with the request: the same policy, asked about a stranger's home, follows what it is shown."""
    policy, a, b = SessionAffinity(), Replica("a"), Replica("b")
    for home in (a, b, a):
        request = Request(b"k", prompt_tokens=10, residents=(Resident(home, 10, 10),), known=True)
        assert policy.pick(request, [a, b], 1.0).replica is home


# 8. Memory

_MEASURE = """
import resource, sys
from policies.balancer import Balancer
from policies.directory import Directory
from policies.registry import make
from policies.types import Cause, Outcome, Phase, Replica, Request, Usage

def rss():  # KiB resident now
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmRSS")).split()[1])

done = Outcome(Cause.DONE, Phase.BODY)
balancer = Balancer(make("session_affinity"), Directory(max_sessions=10**6))
for n in range(64):
    balancer.join(Replica(f"http://replica-{n}:30000"), 0.0)
    balancer.ready[0].cache.resize(690_000, 5_700_000)
figures = []
for n in range(int(sys.argv[1])):
    if n % (int(sys.argv[1]) // 2) == 0:
        figures.append(rss())
    blocks = tuple(hash((n, i)) & 0xFFFFFFFFFFFFFFFF for i in range(115))
    request = Request(n.to_bytes(16, "big"), None, n + 1, 115_000, blocks)
    lease = balancer.acquire(request, n * 0.01)
    lease.first_token(n * 0.01)
    lease.finish(done, Usage(115_000, 0, 500), n * 0.01)
figures.append(rss())
print(figures[1], figures[2])
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="measures resident memory as Linux tells it")
def test_a_million_sessions_stay_under_a_gibibyte() -> None:
    """Measured from 20,000 to 40,000 sessions of 115,000 tokens and drawn out: what each needs does not change."""
    sessions = 40_000
    measured = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(sessions)], capture_output=True, text=True, check=True, timeout=120
    )
    half, whole = (1024 * int(kib) for kib in measured.stdout.split())
    each = (whole - half) / (sessions / 2)
    assert each > 100, "or nothing was measured"
    million = half + each * (10**6 - sessions / 2)
    assert million < 2**30, f"{each:.0f} bytes a session, {million / 2**20:.0f} MiB for a million"
