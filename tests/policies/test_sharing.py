"""What one router tells another is worth as much as having seen it oneself."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import cost
from policies.balancer import Balancer
from policies.lease import Lease
from policies.registry import make
from policies.sharing import Note, note_of, notes_of
from policies.types import OUTCOMES, Cause, Load, Phase, Replica, Request, Usage

DONE, LEFT = OUTCOMES[Cause.DONE, Phase.BODY], OUTCOMES[Cause.CLIENT, Phase.HEADERS]
REPLICAS = ("a", "b", "c")


def balancer() -> Balancer:
    made = Balancer(make("session_affinity"))
    for name in REPLICAS:
        made.join(Replica(name), 0.0)
    return made


def key(number: int) -> bytes:
    return b"%016d" % number


def turn(at: Balancer, session: int, tokens: int, now: float, head: int = 0) -> Lease:
    """A whole one. Its body begins with `head` and grows; none of it is the same under another head."""
    blocks = tuple(hash((session, head, number)) & (2**64 - 1) for number in range(tokens // 1_000))
    lease = at.acquire(Request(key(session), fingerprint=7, prompt_tokens=tokens, blocks=blocks), now)
    lease.first_token(now)
    lease.finish(DONE, Usage(tokens, 0, 50), now)
    return lease


def told(lease: Lease) -> Note:
    note = note_of(lease)
    assert note is not None
    return note


@pytest.mark.parametrize("changing", [False, True], ids=["the-body-grows", "its-head-changes"])
@given(turns=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 60), st.booleans()), min_size=1, max_size=60))
@settings(deadline=None)
def test_whoever_hears_all_knows_the_same_homes(turns: list[tuple[int, int, bool]], changing: bool) -> None:
    """Turns of growing sessions come to either of two routers; each tells when a turn begins and when it ends.

    What changes with every turn may stand before what was said, as Claude Code's billing line does.
    """
    routers = (balancer(), balancer())
    notes: list[tuple[Balancer, Lease]] = []
    for one, other in (routers, routers[::-1]):
        one.on_home = lambda lease, other=other: notes.append((other, lease))  # type: ignore[misc]
    now, sizes = 0.0, dict.fromkeys(range(10), 0)
    for number, (session, more, first) in enumerate(turns):
        now += 1.0
        sizes[session] += 1_000 * more
        turn(routers[not first], session, sizes[session], now, number if changing else 0)
        for other, lease in notes:
            other.hear(told(lease), now)
        notes.clear()
        known = [
            [
                [(home.replica.id, home.tokens) for home in branch.homes]
                for branch in router.directory.branches(key(session), now)
            ]
            for router in routers
        ]
        assert known[0] == known[1]
        held = [[replica.cache.held_tokens for replica in router.replicas.values()] for router in routers]
        assert held[0] == held[1]


def test_a_turn_that_computed_nothing_takes_its_home_out() -> None:
    one, other = balancer(), balancer()
    lease = one.acquire(Request(key(1), fingerprint=7, prompt_tokens=5_000), 1.0)
    other.hear(told(lease), 1.0)
    assert notes_of(other.directory.branches(key(1), 1.0)[0])
    lease.finish(LEFT, None, 2.0)
    assert told(lease).tokens == 0
    other.hear(told(lease), 2.0)
    assert not notes_of(other.directory.branches(key(1), 2.0)[0])


@pytest.mark.parametrize(
    ("theirs", "ours", "believed"), [("x", "x", True), ("x", "", True), ("", "y", True), ("x", "y", False)]
)
def test_what_was_resident_in_another_process_is_not_believed(theirs: str, ours: str, believed: bool) -> None:
    one, other = balancer(), balancer()
    note = replace(told(turn(one, 1, 5_000, 1.0)), incarnation=theirs)
    other.replicas[note.replica].incarnation = ours
    other.hear(note, 1.0)
    assert bool(other.directory.branches(key(1), 1.0)) is believed


def test_a_replica_that_is_not_known_is_nobodys_home() -> None:
    one, other = balancer(), balancer()
    note = told(turn(one, 1, 5_000, 1.0))
    other.leave(note.replica, 1.0)
    other.hear(note, 1.0)
    assert not other.directory.branches(key(1), 1.0)


def test_what_others_wait_for_is_waited_for_here_until_it_is_done() -> None:
    router = balancer()
    replica = router.replicas["a"]
    router.hear_load(replica, 2, 40_000, 6.0, 10.0)
    assert cost.requests(replica, 10.0) == 2
    assert cost.expected_wait(replica, 10.0) == pytest.approx(6.0)
    assert cost.expected_wait(replica, 12.0) == pytest.approx(4.0), "it is being computed meanwhile"
    router.hear_load(replica, 2, 10_000, 1.5, 12.0)
    assert cost.expected_wait(replica, 12.0) == pytest.approx(1.5), "the first has its first token"
    router.hear_load(replica, 0, 0, 0.0, 13.0)
    assert (cost.requests(replica, 13.0), cost.expected_wait(replica, 13.0)) == (0, 0.0)


def test_ours_and_theirs_stand_in_one_queue() -> None:
    router = balancer()
    replica = router.replicas["a"]
    for name in ("b", "c"):
        router.leave(name, 1.0)
    router.hear_load(replica, 1, 20_000, 3.0, 1.0)
    first = router.acquire(Request(key(1), prompt_tokens=20_000), 1.0)
    second = router.acquire(Request(key(2), prompt_tokens=20_000), 1.0)
    assert first.choice.wait_s == pytest.approx(3.0)
    assert second.choice.wait_s == pytest.approx(3.0 + first.choice.prefill_s)
    first.first_token(2.0)
    theirs_s = 2.0  # of three seconds, told of a second ago
    assert cost.expected_wait(replica, 2.0) == pytest.approx(theirs_s + second.work_s + replica.speed.overhead_s)
    second.finish(LEFT, None, 2.0)
    assert cost.expected_wait(replica, 2.0) == pytest.approx(theirs_s)


def test_the_engine_sees_ours_theirs_and_strangers_and_strangers_are_what_is_left() -> None:
    router = balancer()
    replica = router.replicas["a"]
    router.hear_load(replica, 3, 30_000, 5.0, 1.0)
    for at in (1.0, 2.0):
        router.report(replica, Load(at, running=5, waiting=2, waiting_tokens=34_000), at)
    assert (replica.others_running, replica.foreign) == (7, (4, 4_000))
    router.hear_load(replica, 0, 0, 0.0, 3.0)
    assert replica.others_running == 4
    late = 3.0 + cost.REPORT_MAX_AGE_S
    router.hear_load(replica, 1, 0, 0.0, late)
    assert cost.requests(replica, late) == 1, "what the engine saw is too old to be believed; what routers tell is not"
