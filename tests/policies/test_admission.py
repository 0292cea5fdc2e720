"""Facts of Admission with caps: who is placed, who waits, in what order, who is refused. The gate has its own file."""

from __future__ import annotations

from math import inf, nan

import pytest

from policies.admission import Admission, AdmissionConfig, Priority, Shed, ShedReason, Ticket
from policies.admission.room import SHARES
from policies.balancer import Balancer, NoReplica
from policies.lease import Lease
from policies.registry import make
from policies.types import Reason, Request, State
from tests.fakes.fleet import CLIENT_LEFT, DONE, fleet, turn


def _setting(ids: str = "a", policy: str = "session_affinity", **config: object) -> tuple[Balancer, Admission]:
    balancer = fleet(make(policy), ids)
    return balancer, Admission(balancer, AdmissionConfig(**config))  # type: ignore[arg-type]


def _ask(key: str = "", tokens: int = 1000) -> Request:
    return Request(key=key.encode() or None, prompt_tokens=tokens)


def _placed(entered: Lease | Ticket) -> Lease:
    assert isinstance(entered, Lease)
    return entered


def _waits(entered: Lease | Ticket) -> Ticket:
    assert isinstance(entered, Ticket)
    return entered


def _refused(admission: Admission, now: float, key: str = "") -> Shed:
    with pytest.raises(Shed) as refused:
        admission.enter(_ask(key), now)
    return refused.value


def _drain(admission: Admission, leases: list[Lease], now: float) -> list[str]:
    """One lease at a time ends and is followed by another: the sessions in the order in which they are placed."""
    order = []
    while admission.waiting:
        leases.pop(0).finish(DONE, None, now)
        for ticket in admission.due(now):
            assert ticket.lease is not None
            leases.append(ticket.lease)
            order.append((ticket.request.key or b"").decode())
    return order


# Configuration


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("max_running", -1),
        ("max_running", 1.0),
        ("max_running_per_replica", True),
        ("max_tokens", -5),
        ("max_tokens_per_replica", "many"),
        ("max_waiting", -1),
        ("max_wait_s", 0),
        ("max_wait_s", inf),
        ("max_wait_s", nan),
        ("max_hold_s", 1),
        ("kv_gate", 1),
    ],
)
def test_a_bad_value_is_refused_by_key_and_value(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=key) as error:
        AdmissionConfig(**{key: value})  # type: ignore[arg-type]
    assert repr(value) in str(error.value)


def test_without_caps_all_are_placed_at_once() -> None:
    balancer, admission = _setting()
    leases = [_placed(admission.enter(_ask(f"s{i}", 10**6), 1.0)) for i in range(500)]
    assert balancer.in_flight == len(leases)
    assert admission.due(2.0) == []
    assert admission.waiting == 0


# Caps


def test_as_many_run_as_may_and_the_next_follows_when_one_ends() -> None:
    balancer, admission = _setting("ab", max_running=2)
    first, second = (_placed(admission.enter(_ask(key), 1.0)) for key in "xy")
    ticket = _waits(admission.enter(_ask("z"), 2.0))
    assert admission.due(3.0) == []
    assert admission.waiting == 1
    first.finish(DONE, None, 4.0)
    assert admission.due(4.0) == [ticket]
    assert ticket.lease is not None
    assert ticket.error is None
    assert (balancer.in_flight, admission.waiting, admission.waited) == (2, 0, 1)
    second.finish(DONE, None, 5.0)
    ticket.lease.finish(DONE, None, 5.0)
    assert (balancer.in_flight, balancer.in_flight_tokens) == (0, 0)


def test_a_replica_at_its_cap_is_no_candidate() -> None:
    _, admission = _setting("ab", max_running_per_replica=1)
    places = {_placed(admission.enter(_ask("same"), 1.0)).replica.id for _ in range(2)}
    assert places == {"a", "b"}
    assert _waits(admission.enter(_ask("same"), 1.0))


def test_a_home_at_its_cap_is_lost_for_this_once_and_kept() -> None:
    balancer, admission = _setting("ab", max_running_per_replica=1)
    turn(balancer, _ask("s", 50_000), 1.0, 50_000)
    home = balancer.directory.branches(b"s", 2.0)[0].homes[0].replica
    blocker = balancer.acquire(_ask("s", 50_000), 3.0)
    assert blocker.replica is home
    request = _ask("s", 50_000)
    away = _placed(admission.enter(request, 4.0))
    assert away.replica is not home
    assert away.choice.reason is not Reason.HOME
    assert request.failed == ()


def test_tokens_in_flight_are_capped_in_total_and_by_replica() -> None:
    _, admission = _setting("ab", max_tokens=10_000)
    _placed(admission.enter(_ask("x", 9_000), 1.0))
    assert _waits(admission.enter(_ask("y", 2_000), 1.0))
    _, admission = _setting("ab", max_tokens_per_replica=10_000)
    assert _placed(admission.enter(_ask("x", 9_000), 1.0)).replica.in_flight_tokens == 9_000
    _placed(admission.enter(_ask("y", 9_000), 1.0))
    assert _waits(admission.enter(_ask("z", 2_000), 1.0))


def test_a_request_larger_than_the_cap_goes_when_it_is_alone() -> None:
    for cap in ("max_tokens", "max_tokens_per_replica"):
        _, admission = _setting("a", **{cap: 1_000})
        _placed(admission.enter(_ask("x", 50_000), 1.0)).finish(DONE, None, 2.0)
        blocker = _placed(admission.enter(_ask("y", 10), 3.0))
        ticket = _waits(admission.enter(_ask("x", 50_000), 3.0))
        assert admission.due(4.0) == []
        blocker.finish(DONE, None, 5.0)
        assert admission.due(5.0) == [ticket]


def test_a_redispatch_never_waits() -> None:
    balancer, admission = _setting("ab", max_running=1)
    lease = _placed(admission.enter(_ask("x"), 1.0))
    waits = _waits(admission.enter(_ask("y"), 1.0))
    lease.finish(DONE, None, 2.0)
    lease.request.failed += (lease.replica,)
    again = balancer.acquire(lease.request, 2.0)
    assert again.replica is not lease.replica
    assert admission.due(2.0) == []
    again.finish(DONE, None, 3.0)
    assert admission.due(3.0) == [waits]


def test_a_cap_on_tokens_counts_what_the_engine_is_known_to_make_of_a_prompt() -> None:
    for cap in ("max_tokens", "max_tokens_per_replica"):
        balancer, admission = _setting("a", **{cap: 50_000})
        turn(balancer, _ask("s", 10_000), 1.0, 20_000)  # twice the estimate
        _placed(admission.enter(_ask("x", 20_000), 3.0))
        assert _waits(admission.enter(_ask("s", 20_000), 3.0)), "20,000 are 40,000 there"
        assert balancer.in_flight_tokens == 20_000


def _finishing(ids: str) -> tuple[Balancer, Admission]:
    """The session `s` lives on a replica that finishes its sessions."""
    balancer, admission = _setting(ids, max_running_per_replica=1)
    turn(balancer, _ask("s", 50_000), 1.0, 50_000)
    balancer.set_state(balancer.directory.branches(b"s", 2.0)[0].homes[0].replica, State.FINISHING, 2.0)
    return balancer, admission


def test_a_session_waits_for_the_replica_that_finishes_it_when_there_is_no_other() -> None:
    _, admission = _finishing("a")
    lease = _placed(admission.enter(_ask("s", 50_000), 3.0))
    with pytest.raises(NoReplica, match="all_draining"):
        admission.enter(_ask("new"), 3.0)
    ticket = _waits(admission.enter(_ask("s", 50_000), 3.0))
    lease.finish(DONE, None, 4.0)
    assert admission.due(4.0) == [ticket]
    assert ticket.lease is not None
    assert ticket.lease.choice.reason is Reason.HOME


def test_a_session_does_not_wait_for_others_while_the_replica_that_finishes_it_has_room() -> None:
    _, admission = _finishing("ab")
    assert _placed(admission.enter(_ask("new"), 3.0)).replica.state is State.READY
    assert _placed(admission.enter(_ask("s", 50_000), 3.0)).replica.state is State.FINISHING


def test_no_replica_is_told_at_once_and_to_those_that_wait() -> None:
    balancer, admission = _setting("a", max_running=1)
    lease = _placed(admission.enter(_ask("x"), 1.0))
    ticket = _waits(admission.enter(_ask("y"), 1.0))
    balancer.set_state(balancer.replicas["a"], State.EJECTED, 2.0)
    with pytest.raises(NoReplica):
        admission.enter(_ask("w"), 2.0)
    assert admission.due(2.0) == [], "it may be for a moment only"
    lease.finish(DONE, None, 3.0)
    assert admission.due(3.0) == [ticket]
    assert isinstance(ticket.error, NoReplica)
    assert (ticket.error.reason, ticket.lease) == ("all_ejected", None)
    with pytest.raises(NoReplica):
        admission.enter(_ask("z"), 4.0)


def test_caps_may_be_changed_while_requests_run_and_wait() -> None:
    balancer, admission = _setting("a", max_running=1)
    _placed(admission.enter(_ask("x"), 1.0))
    tickets = [_waits(admission.enter(_ask(key), 1.0)) for key in "yz"]
    admission.configure(AdmissionConfig(), 2.0)
    assert admission.due(2.0) == tickets
    assert balancer.in_flight == 3
    admission.configure(AdmissionConfig(max_running=1), 3.0)
    assert _waits(admission.enter(_ask("x"), 3.0))


# Order


def test_a_fan_out_of_one_session_does_not_starve_others() -> None:
    _, admission = _setting("a", max_running=1)
    leases = [_placed(admission.enter(_ask("first"), 1.0))]
    for _ in range(50):
        _waits(admission.enter(_ask("fan"), 1.0))
    for key in ("u", "v", "w"):
        _waits(admission.enter(_ask(key), 2.0))
    order = _drain(admission, leases, 3.0)
    assert order[:4] == ["fan", "u", "v", "w"]
    assert order[4:] == ["fan"] * 49


def test_sub_agents_take_their_parents_turn() -> None:
    _, admission = _setting("a", max_running=1)
    leases = [_placed(admission.enter(_ask("first"), 1.0))]
    for i in range(20):
        _waits(admission.enter(Request(key=f"child{i}".encode(), parent=b"p", prompt_tokens=10), 1.0))
    _waits(admission.enter(_ask("u"), 2.0))
    assert _drain(admission, leases, 3.0)[1] == "u"


def test_requests_that_name_no_session_share_one_turn() -> None:
    _, admission = _setting("a", max_running=1)
    leases = [_placed(admission.enter(_ask(), 1.0))]
    for _ in range(20):
        _waits(admission.enter(_ask(), 1.0))
    _waits(admission.enter(_ask("u"), 2.0))
    assert _drain(admission, leases, 3.0)[1] == "u"


def test_warm_turns_go_before_cold_ones_but_not_always() -> None:
    balancer, admission = _setting("a", max_running=1)
    for i in range(12):
        turn(balancer, _ask(f"warm{i}", 20_000), 1.0, 20_000)
    leases = [_placed(admission.enter(_ask("first"), 10.0))]
    for i in range(12):
        _waits(admission.enter(_ask(f"cold{i}", 20_000), 11.0))
    for i in range(12):
        _waits(admission.enter(_ask(f"warm{i}", 20_000), 12.0))
    order = _drain(admission, leases, 13.0)
    warm = [key.startswith("warm") for key in order]
    assert sum(warm[:8]) == 6
    assert all(not all(warm[at : at + 4]) for at in range(0, 12, 4))


def test_priorities_are_shares_and_starve_nobody() -> None:
    _, admission = _setting("a", max_running=1)
    leases = [_placed(admission.enter(_ask("first"), 1.0))]
    for priority in (Priority.LOW, Priority.NORMAL, Priority.HIGH):
        for i in range(28):
            _waits(admission.enter(_ask(f"{priority}{i}"), 2.0, priority))
    order = [key.rstrip("0123456789") for key in _drain(admission, leases, 3.0)]
    assert [order[:28].count(priority) for priority in Priority] == [16, 8, 4]
    assert len(order) == 84


def test_every_class_has_a_share() -> None:
    assert set(SHARES) == {(priority, warm) for priority in Priority for warm in (True, False)}


# Leaving and being refused


def test_a_client_that_leaves_gives_its_place() -> None:
    _, admission = _setting("a", max_running=1, max_waiting=2)
    lease = _placed(admission.enter(_ask("x"), 1.0))
    gone, stays = (_waits(admission.enter(_ask(key), 1.0)) for key in "yz")
    assert _refused(admission, 2.0).reason is ShedReason.ROOM_FULL
    gone.cancel(2.0)
    gone.cancel(2.0)
    assert (admission.waiting, admission.left) == (1, 1)
    late = _waits(admission.enter(_ask("w"), 3.0))
    lease.finish(CLIENT_LEFT, None, 4.0)
    assert admission.due(4.0) == [stays]
    stays.cancel(5.0)
    assert stays.lease is not None
    assert not stays.lease.finished
    stays.lease.finish(DONE, None, 5.0)
    assert admission.due(5.0) == [late]
    assert gone.lease is None


def test_with_no_room_the_next_is_refused_at_once() -> None:
    _, admission = _setting("a", max_running=1, max_waiting=0)
    _placed(admission.enter(_ask("x"), 1.0))
    refused = _refused(admission, 1.0)
    assert refused.reason is ShedReason.ROOM_FULL
    assert 1 <= refused.retry_after_s <= 60
    assert admission.sheds[ShedReason.ROOM_FULL] == 1


def test_who_has_waited_long_enough_is_refused_and_the_others_stay() -> None:
    _, admission = _setting("a", max_running=1, max_wait_s=10.0)
    _placed(admission.enter(_ask("x"), 1.0))
    early, late = _waits(admission.enter(_ask("y"), 2.0)), _waits(admission.enter(_ask("z"), 5.0))
    assert admission.due(11.9) == []
    assert admission.due(12.0) == [early]
    assert isinstance(early.error, Shed)
    assert early.error.reason is ShedReason.WAIT_TOO_LONG
    assert late.deadline == 15.0


def test_a_shorter_deadline_is_kept_to_behind_longer_ones() -> None:
    _, admission = _setting("a", max_running=1, max_wait_s=3600.0)
    _placed(admission.enter(_ask("x"), 1.0))
    patient = _waits(admission.enter(_ask("y"), 1.0))
    admission.configure(AdmissionConfig(max_running=1, max_wait_s=5.0), 2.0)
    early, late = _waits(admission.enter(_ask("z"), 2.0)), _waits(admission.enter(_ask("w"), 3.0))
    assert admission.due(7.0) == [early]
    assert admission.due(8.0) == [late]
    assert (patient.error, admission.waiting) == (None, 1)


def _busy(rate: float, waiting: int, max_wait_s: float = 10.0) -> tuple[Admission, float]:
    """A room through which `rate` requests a second have gone for 30 seconds, and in which some wait still."""
    _, admission = _setting("a", max_running=1, max_wait_s=max_wait_s)
    lease = _placed(admission.enter(_ask("first"), 0.0))
    now = 0.0
    for i in range(int(30 * rate)):
        _waits(admission.enter(_ask(f"s{i}"), now))
        now += 1.0 / rate
        if i:
            lease.finish(DONE, None, now)
            (ticket,) = admission.due(now)
            assert ticket.lease is not None
            lease = ticket.lease
    for i in range(waiting - admission.waiting):
        _waits(admission.enter(_ask(f"w{i}"), now))
    return admission, now


def test_retry_after_is_when_the_room_will_have_emptied_at_its_present_rate() -> None:
    admission, now = _busy(2.0, 10)
    admission.configure(AdmissionConfig(max_running=1, max_waiting=0), now)
    assert _refused(admission, now).retry_after_s in (5, 6)


@pytest.mark.parametrize(("max_wait_s", "told_s"), [(0.5, 1), (2.0, 2), (600.0, 60)])
def test_while_no_rate_is_known_all_that_wait_have_left_by_their_deadlines(max_wait_s: float, told_s: int) -> None:
    _, admission = _setting("a", max_running=1, max_waiting=1, max_wait_s=max_wait_s)
    _placed(admission.enter(_ask("x"), 1.0))
    _waits(admission.enter(_ask("y"), 1.0))
    assert _refused(admission, 1.0).retry_after_s == told_s


def test_a_wait_that_is_sure_to_be_too_long_is_refused_at_once() -> None:
    admission, now = _busy(2.0, 20)
    refused = _refused(admission, now, "late")
    assert refused.reason is ShedReason.WAIT_TOO_LONG
    assert refused.retry_after_s in (10, 11)
    admission, now = _busy(2.0, 15)
    assert _waits(admission.enter(_ask("late"), now))


def test_nothing_is_predicted_of_a_room_in_which_nothing_has_moved() -> None:
    _, admission = _setting("a", max_running=1, max_wait_s=10.0)
    _placed(admission.enter(_ask("x"), 0.0))
    for i in range(100):
        assert _waits(admission.enter(_ask(f"s{i}"), 9.0))
