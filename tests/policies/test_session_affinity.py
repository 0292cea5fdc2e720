"""Facts of session_affinity: a session stays where its KV cache is; all others go where they are served soonest."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from policies.balancer import Balancer
from policies.cost import REPORT_MAX_AGE_S
from policies.hashing import rendezvous
from policies.registry import POLICIES, make
from policies.session_affinity import SessionAffinity
from policies.types import Load, Reason, Replica, Request, Resident, State, Usage
from tests.fakes.fleet import CLIENT_LEFT, DONE, REFUSED, fleet, turn

MAIN, TITLE, UNHEARD_OF = 11, 22, 33
"""Fingerprints of a main thread, of its title call, and of a fork nobody has seen."""


def _start(ids: str = "abc") -> Balancer:
    return fleet(SessionAffinity(), ids)


def _ask(balancer: Balancer, now: float, key: bytes | None = b"k", fingerprint: int = MAIN, **more: object) -> Reason:
    return balancer.explain(Request(key=key, fingerprint=fingerprint, **more), now).reason  # type: ignore[arg-type]


# Home


def test_a_session_stays_home_turn_after_turn() -> None:
    balancer = _start()
    home = turn(balancer, Request(key=b"k", fingerprint=MAIN), 1.0).replica
    for now in range(10, 100, 10):
        lease = turn(balancer, Request(key=b"k", fingerprint=MAIN), float(now))
        assert (lease.replica, lease.choice.reason) == (home, Reason.HOME)


def test_home_keeps_its_session_however_busy_it_is() -> None:
    """In this simplest form nothing outweighs a home; the trade in seconds is another policy's."""
    balancer = _start()
    home = turn(balancer, Request(key=b"k", fingerprint=MAIN), 1.0).replica
    home.in_flight, home.prefill_tokens = 500, 10_000_000
    choice = balancer.explain(Request(key=b"k", fingerprint=MAIN), 5.0)
    assert (choice.replica, choice.reason) == (home, Reason.HOME)


def test_resident_tokens_are_what_was_reported_but_never_more_than_the_prompt() -> None:
    balancer = _start()
    turn(balancer, Request(key=b"k", fingerprint=MAIN), 1.0, prompt=50_000, completion=500)
    for prompt, resident in [(60_000, 50_500), (50_500, 50_500), (100, 100), (0, 0)]:
        request = Request(key=b"k", fingerprint=MAIN, prompt_tokens=prompt)
        assert balancer.explain(request, 5.0).resident_tokens == resident


def test_another_conversation_of_the_session_has_nothing_resident() -> None:
    balancer = _start()
    home = turn(balancer, Request(key=b"k", fingerprint=MAIN), 1.0, prompt=50_000).replica
    choice = balancer.explain(Request(key=b"k", fingerprint=UNHEARD_OF, prompt_tokens=60_000), 5.0)
    assert (choice.replica, choice.reason, choice.resident_tokens) == (home, Reason.HOME, 0)


def test_conversations_of_one_session_each_return_to_their_own_home() -> None:
    balancer = _start("ab")
    a, b = balancer.ready
    balancer.directory.place(b"k", MAIN, "a", 900, 1.0)
    balancer.directory.place(b"k", TITLE, "b", 50, 2.0)
    assert balancer.explain(Request(key=b"k", fingerprint=MAIN), 3.0).replica is a
    assert balancer.explain(Request(key=b"k", fingerprint=TITLE), 3.0).replica is b


@pytest.mark.parametrize("last", ["a", "b", "c"])
def test_an_unheard_of_fork_goes_to_the_last_home_of_its_session(last: str) -> None:
    balancer = _start()
    for n, replica_id in enumerate([i for i in "abc" if i != last] + [last]):
        balancer.directory.place(b"k", n, replica_id, 1000, float(n))
    choice = balancer.explain(Request(key=b"k", fingerprint=UNHEARD_OF), 10.0)
    assert (choice.replica.id, choice.reason) == (last, Reason.HOME)


def test_a_fork_whose_last_home_is_gone_goes_to_the_one_before() -> None:
    balancer = _start()
    balancer.directory.place(b"k", 1, "a", 1000, 1.0)
    balancer.directory.place(b"k", 2, "b", 1000, 2.0)
    balancer.leave("b", 3.0)
    assert balancer.explain(Request(key=b"k", fingerprint=UNHEARD_OF), 4.0).replica.id == "a"


def test_a_client_that_left_early_still_has_its_home() -> None:
    balancer = _start()
    lease = balancer.acquire(Request(key=b"k", fingerprint=MAIN), 1.0)
    lease.finish(CLIENT_LEFT, None, 2.0)
    choice = balancer.explain(Request(key=b"k", fingerprint=MAIN), 3.0)
    assert (choice.replica, choice.reason) == (lease.replica, Reason.HOME)


def test_an_engine_that_reports_no_usage_is_believed_to_hold_the_prompt_it_answered() -> None:
    """Engines leave usage out of streams unless asked; else every turn would count as a full prefill."""
    balancer = _start()
    lease = balancer.acquire(Request(key=b"k", fingerprint=MAIN, prompt_tokens=50_000), 1.0)
    lease.finish(DONE, None, 2.0)
    choice = balancer.explain(Request(key=b"k", fingerprint=MAIN, prompt_tokens=51_000), 3.0)
    assert choice.resident_tokens == 50_000


# New sessions


def test_a_new_session_goes_where_the_wait_is_least() -> None:
    balancer = _start()
    a, b, c = balancer.ready
    a.in_flight, b.in_flight, c.prefill_tokens = 2, 3, 60_000
    for n in range(50):
        choice = balancer.explain(Request(key=b"%d" % n), 1.0)
        assert (choice.replica, choice.reason) == (a, Reason.NEW)


def test_near_ties_are_settled_by_rendezvous_among_the_near_only() -> None:
    balancer = _start()
    a, b, c = balancer.ready
    b.prefill_tokens = 1_500  # 0.1 s: near
    c.prefill_tokens = 3_000  # 0.2 s: not
    chosen = set()
    for n in range(200):
        key = b"%d" % n
        choice = balancer.explain(Request(key=key), 1.0)
        assert choice.replica is rendezvous(key, [a, b])
        chosen.add(choice.replica)
    assert chosen == {a, b}


def test_the_reach_of_a_tie_is_a_parameter() -> None:
    replicas = [Replica("a"), Replica("b", prefill_tokens=15_000)]
    keys = [b"%d" % n for n in range(100)]
    never = {SessionAffinity(tie_s=0.0).pick(Request(key=k), replicas, 1.0).replica.id for k in keys}
    always = {SessionAffinity(tie_s=5.0).pick(Request(key=k), replicas, 1.0).replica.id for k in keys}
    assert (never, always) == ({"a"}, {"a", "b"})


def test_routers_that_know_nothing_agree() -> None:
    one, other = _start("abcdefgh"), _start("hgfedcba")
    for n in range(200):
        request = Request(key=b"%d" % n)
        assert one.explain(request, 1.0).replica.id == other.explain(request, 1.0).replica.id


def test_requests_without_a_session_go_by_load_and_take_turns_when_equal() -> None:
    balancer = _start()
    leases = [balancer.acquire(Request(), 1.0) for _ in range(9)]
    assert {lease.choice.reason for lease in leases} == {Reason.NO_SESSION}
    assert [r.in_flight for r in balancer.ready] == [3, 3, 3]
    for lease in leases:
        lease.finish(DONE, None, 2.0)
    assert len(balancer.directory) == 0
    assert {turn(balancer, Request(), 3.0 + n).replica.id for n in range(3)} == {"a", "b", "c"}


def test_a_fleet_drowned_in_bad_figures_still_serves() -> None:
    balancer = _start()
    nan = float("nan")
    for replica in balancer.ready:
        load = Load(at=1.0, running=10**9, waiting=10**9, waiting_tokens=10**15, prefill_tokens_per_s=nan)
        balancer.report(replica, load, 1.0)
    for request in (Request(key=b"k", prompt_tokens=10**15), Request(prompt_tokens=10**15), Request()):
        lease = balancer.acquire(request, 1.0)
        assert lease.replica in balancer.ready
        assert lease.choice.wait_s >= 0.0


# Home lost


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
    home = turn(balancer, Request(key=b"k", fingerprint=MAIN), 1.0, prompt=50_000).replica
    lose(balancer, home)
    request = Request(key=b"k", fingerprint=MAIN, prompt_tokens=50_000)
    choice = balancer.explain(request, 12.0)
    assert (choice.reason, choice.resident_tokens) == (Reason.HOME_LOST, 0)
    assert choice.replica in balancer.ready
    assert _ask(balancer, 12.0, fingerprint=UNHEARD_OF) is Reason.HOME_LOST, "its forks have lost it too"
    assert _ask(balancer, 12.0, key=b"another") is Reason.NEW


@pytest.mark.parametrize("lose", [_eject, _drain, _leave, _rejoin, _replace, _clear])
def test_after_the_loss_the_session_settles_again(lose: Callable[[Balancer, Replica], None]) -> None:
    balancer = _start()
    home = turn(balancer, Request(key=b"k", fingerprint=MAIN), 1.0).replica
    lose(balancer, home)
    first = turn(balancer, Request(key=b"k", fingerprint=MAIN), 12.0)
    second = turn(balancer, Request(key=b"k", fingerprint=MAIN), 20.0)
    assert first.choice.reason is Reason.HOME_LOST
    assert (second.choice.reason, second.replica) == (Reason.HOME, first.replica)


def test_a_home_ejected_for_a_moment_is_home_again() -> None:
    balancer = _start()
    home = turn(balancer, Request(key=b"k", fingerprint=MAIN), 1.0).replica
    balancer.set_state(home, State.EJECTED, 10.0)
    balancer.set_state(home, State.READY, 20.0)
    choice = balancer.explain(Request(key=b"k", fingerprint=MAIN), 21.0)
    assert (choice.replica, choice.reason) == (home, Reason.HOME)


def test_a_home_that_just_failed_is_passed_over_and_the_session_moves() -> None:
    balancer = _start()
    home = turn(balancer, Request(key=b"k", fingerprint=MAIN), 1.0).replica
    request = Request(key=b"k", fingerprint=MAIN)
    first = balancer.acquire(request, 10.0)
    first.finish(REFUSED, None, 10.1)
    request.failed = (first.replica,)
    second = balancer.acquire(request, 10.1)
    assert first.replica is home
    assert second.replica is not home
    assert second.choice.reason is Reason.HOME_LOST
    second.finish(DONE, None, 11.0)
    assert balancer.explain(Request(key=b"k", fingerprint=MAIN), 12.0).replica is second.replica


def test_an_answer_from_a_replica_that_was_replaced_says_nothing_of_its_successor() -> None:
    """The old process held the tokens; the new one, under the same id, is empty."""
    balancer = _start("a")
    lease = balancer.acquire(Request(key=b"k", fingerprint=MAIN), 1.0)
    balancer.join(Replica("a"), 2.0)
    lease.finish(DONE, Usage(50_000, 0, 100), 3.0)
    choice = balancer.explain(Request(key=b"k", fingerprint=MAIN, prompt_tokens=60_000), 4.0)
    assert (choice.reason, choice.resident_tokens) == (Reason.HOME_LOST, 0)


@pytest.mark.parametrize("lose", [_rejoin, _replace, _clear])
def test_tokens_lost_with_a_cache_do_not_come_back_when_the_session_does(
    lose: Callable[[Balancer, Replica], None],
) -> None:
    balancer = _start("a")
    home = turn(balancer, Request(key=b"k", fingerprint=MAIN), 1.0, prompt=50_000).replica
    lose(balancer, home)
    lease = balancer.acquire(Request(key=b"k", fingerprint=MAIN, prompt_tokens=60_000), 12.0)
    assert lease.choice.reason is Reason.HOME_LOST
    fork = balancer.acquire(Request(key=b"k", fingerprint=MAIN, prompt_tokens=60_000), 12.1)
    assert fork.choice.resident_tokens == 0, "nothing was prefilled there since"


_steps = st.lists(
    st.one_of(
        st.tuples(st.just("open"), st.integers(1, 2), st.none()),
        st.tuples(st.just("close"), st.integers(0, 9), st.none() | st.integers(1, 90_000)),
        st.tuples(st.just("replace"), st.sampled_from("ab"), st.none()),
        st.tuples(st.just("clear"), st.sampled_from("ab"), st.none()),
    ),
    max_size=25,
)


def test_nothing_is_believed_resident_that_was_not_finished_there_since_its_cache_was_empty() -> None:
    @given(_steps)
    @example(
        [
            ("open", 1, None),
            ("close", 0, 50_000),
            ("replace", "a", None),
            ("replace", "b", None),
            ("open", 1, None),
            ("open", 1, None),
        ]
    )
    @settings(max_examples=300, deadline=None)
    def check(steps: list[tuple[str, int | str, int | None]]) -> None:
        balancer, now, leases = _start("ab"), 0.0, []
        held: dict[tuple[Replica, int], int] = {}
        for verb, what, tokens in steps:
            now += 1.0
            if verb == "open":
                lease = balancer.acquire(Request(key=b"k", fingerprint=int(what), prompt_tokens=10**6), now)
                assert lease.choice.resident_tokens <= held.get((lease.replica, int(what)), 0)
                leases.append(lease)
            elif verb == "close" and leases:
                lease = leases.pop(int(what) % len(leases))
                if tokens is None:
                    lease.finish(REFUSED, None, now)
                else:
                    lease.finish(DONE, Usage(tokens, 0, 0), now)
                place = lease.replica, lease.request.fingerprint
                held[place] = max(held.get(place, 0), tokens or 0)
            elif verb == "replace":
                balancer.join(Replica(str(what)), now)
            elif verb == "clear":
                replica = balancer.replicas[str(what)]
                balancer.cache_cleared(replica, now)
                held = {place: n for place, n in held.items() if place[0] is not replica}

    check()


# What engines report


def test_a_report_adds_to_own_knowledge_and_never_replaces_it() -> None:
    balancer = _start("ab")
    a, b = balancer.ready
    open_leases = [balancer.acquire(Request(failed=(b,)), 1.0) for _ in range(3)]
    assert a.in_flight == len(open_leases)
    balancer.report(a, Load(at=1.0, running=0, waiting=0, waiting_tokens=0), 1.0)
    balancer.report(b, Load(at=1.0, running=1, waiting=0, waiting_tokens=0), 1.0)
    assert balancer.explain(Request(key=b"k"), 2.0).replica is b, "a says it is idle, but three of ours are on the way"
    balancer.report(b, Load(at=2.0, running=9, waiting=0, waiting_tokens=0), 2.0)
    assert balancer.explain(Request(key=b"k"), 2.0).replica is a, "others keep b busier than ours keep a"


def test_an_old_report_is_neither_load_nor_idleness() -> None:
    balancer = _start("ab")
    a, b = balancer.ready
    balancer.report(a, Load(at=1.0, running=50, waiting=50), 1.0)
    fresh, stale = 2.0, 1.1 + REPORT_MAX_AGE_S
    keys = [b"%d" % n for n in range(50)]
    assert {balancer.explain(Request(key=k), fresh).replica for k in keys} == {b}
    assert {balancer.explain(Request(key=k), stale).replica for k in keys} == {a, b}
    balancer.report(a, Load(at=stale, running=0, waiting=0), stale)
    a.in_flight = 4
    much_later = stale + 10 * REPORT_MAX_AGE_S
    assert {balancer.explain(Request(key=k), much_later).replica for k in keys} == {b}


def test_a_report_does_not_move_a_session() -> None:
    balancer = _start()
    home = turn(balancer, Request(key=b"k", fingerprint=MAIN), 1.0).replica
    balancer.report(home, Load(at=2.0, running=500, waiting=500, waiting_tokens=10**7), 2.0)
    assert balancer.explain(Request(key=b"k", fingerprint=MAIN), 3.0).replica is home


# Other policies in between


@pytest.mark.parametrize("between", [name for name in POLICIES if name != "session_affinity"])
def test_homes_outlive_a_switch_of_policy(between: str) -> None:
    balancer = _start()
    homes = {
        key: turn(balancer, Request(key=key, fingerprint=MAIN), 1.0).replica for key in (b"%d" % n for n in range(30))
    }
    balancer.switch(make(between), 10.0)
    for n in range(5):
        turn(balancer, Request(), 11.0 + n)
    balancer.switch(SessionAffinity(), 20.0)
    for key, home in homes.items():
        choice = balancer.explain(Request(key=key, fingerprint=MAIN), 21.0)
        assert (choice.replica, choice.reason) == (home, Reason.HOME)


def test_sessions_placed_by_another_policy_are_at_home_where_it_put_them() -> None:
    balancer = fleet(make("round_robin"))
    homes = {key: turn(balancer, Request(key=key), 1.0).replica for key in (b"%d" % n for n in range(9))}
    balancer.switch(SessionAffinity(), 10.0)
    for key, home in homes.items():
        choice = balancer.explain(Request(key=key, fingerprint=MAIN), 11.0)
        assert (choice.replica, choice.reason) == (home, Reason.HOME)


def test_the_policy_itself_remembers_no_session() -> None:
    """Homes come with the request: the same policy, asked about a stranger's home, follows what it is shown."""
    policy, a, b = SessionAffinity(), Replica("a"), Replica("b")
    for home in (a, b, a):
        request = Request(key=b"k", residents=(Resident(home, 10, True),), known=True)
        assert policy.pick(request, [a, b], 1.0).replica is home
