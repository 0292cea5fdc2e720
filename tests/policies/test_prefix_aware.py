"""Facts of `prefix_aware`. Beside its origin: tests/origins/test_prefix_aware.py."""

from __future__ import annotations

from math import inf, nan

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.prefix_aware import PrefixAwareConfig
from policies.prefix_index import BLOCK_TOKENS
from policies.registry import make
from policies.types import Reason, Replica, Request, Resident
from tests.fakes.fleet import DONE, REFUSED, fleet, turn


def prompt(*blocks: int, rest: int = 0) -> Request:
    """A prompt of these blocks and `rest` tokens more."""
    return Request(blocks=blocks, prompt_tokens=len(blocks) * BLOCK_TOKENS + rest)


def test_the_replica_that_holds_the_longest_part_gets_it() -> None:
    balancer = fleet(make("prefix_aware"))
    homes = [turn(balancer, prompt(n, n + 10, n + 20), 1.0 + n).replica.id for n in range(3)]
    assert sorted(homes) == ["a", "b", "c"]
    for n, home in enumerate(homes):
        choice = balancer.explain(prompt(n, n + 10, n + 20, n + 30), 9.0)
        assert (choice.replica.id, choice.reason) == (home, Reason.PREFIX)
        assert choice.resident_tokens == 3 * BLOCK_TOKENS


@pytest.mark.parametrize(("rest", "reason"), [(0, Reason.PREFIX), (1, Reason.LEAST_LOADED)])
def test_a_match_counts_when_it_is_more_than_the_threshold(rest: int, reason: Reason) -> None:
    balancer = fleet(make("prefix_aware", {"cache_threshold": 0.6}), "ab")
    balancer.acquire(prompt(1, 2, 3, 4, 5, 6, 7), 1.0)
    # 7 of 11 2/3 blocks are 0.6.
    choice = balancer.explain(prompt(*range(1, 12), rest=682 + rest), 2.0)
    assert (choice.reason, choice.replica.id) == (reason, "a" if reason is Reason.PREFIX else "b")


def test_too_short_a_match_is_still_known_to_be_there() -> None:
    balancer = fleet(make("prefix_aware"), "a")
    balancer.acquire(prompt(1, 2), 1.0)
    choice = balancer.explain(prompt(*range(1, 11)), 2.0)
    assert (choice.reason, choice.resident_tokens) == (Reason.LEAST_LOADED, 2 * BLOCK_TOKENS)


def test_a_new_prompt_goes_where_the_fewest_are_in_flight_and_takes_turns_among_equals() -> None:
    balancer = fleet(make("prefix_aware"))
    leases = [balancer.acquire(prompt(n), 1.0 + n) for n in range(7)]
    assert [lease.replica.id for lease in leases] == ["a", "b", "c", "a", "b", "c", "a"]
    leases[1].finish(DONE, None, 10.0)
    choice = balancer.explain(prompt(99), 11.0)
    assert (choice.replica.id, choice.reason) == ("b", Reason.LEAST_LOADED)


@pytest.mark.parametrize(
    ("absolute", "relative", "loads", "uneven"),
    [
        (4, 1.5, (4, 0), False),  # not more than 4 apart
        (4, 1.5, (5, 0), True),
        (4, 1.5, (15, 10), False),  # not more than 1.5 times
        (4, 1.5, (16, 10), True),
        (0, 1.0, (1, 1), False),
        (0, 1.0, (1, 0), True),
    ],
)
def test_load_is_uneven_when_both_thresholds_are_passed(
    absolute: int, relative: float, loads: tuple[int, int], uneven: bool
) -> None:
    policy = make("prefix_aware", {"balance_abs_threshold": absolute, "balance_rel_threshold": relative})
    balancer = fleet(policy, "ab")
    turn(balancer, prompt(1, 2, 3), 1.0)
    for replica, load in zip(balancer.ready, loads, strict=True):
        replica.in_flight = load
    choice = balancer.explain(prompt(1, 2, 3), 2.0)
    assert (choice.replica.id, choice.reason) == (("b", Reason.SPILLED) if uneven else ("a", Reason.PREFIX))


def test_a_spilled_prompt_is_held_by_both_and_the_first_keeps_it() -> None:
    balancer = fleet(make("prefix_aware", {"balance_abs_threshold": 1}), "ab")
    leases = [balancer.acquire(prompt(1, 2, 3), 1.0 + n) for n in range(3)]
    assert [(lease.replica.id, lease.choice.reason) for lease in leases] == [
        ("a", Reason.LEAST_LOADED),
        ("a", Reason.PREFIX),
        ("b", Reason.SPILLED),
    ]
    for lease in leases:
        lease.finish(DONE, None, 10.0)
    assert balancer.explain(prompt(1, 2, 3, 4), 11.0).replica.id == "a"
    balancer.leave("a", 12.0)
    choice = balancer.explain(prompt(1, 2, 3, 4), 13.0)
    assert (choice.replica.id, choice.reason) == ("b", Reason.PREFIX)


def test_uneven_load_does_not_drive_a_prompt_from_where_the_fewest_are() -> None:
    balancer = fleet(make("prefix_aware", {"balance_abs_threshold": 1}), "ab")
    turn(balancer, prompt(1, 2, 3), 1.0)
    balancer.replicas["b"].in_flight = 9
    choice = balancer.explain(prompt(1, 2, 3), 2.0)
    assert (choice.replica.id, choice.reason) == ("a", Reason.PREFIX)


@pytest.mark.parametrize("lose", ["leave", "rejoin", "clear"])
def test_what_was_lost_is_not_believed_in(lose: str) -> None:
    balancer = fleet(make("prefix_aware"), "abc")
    turn(balancer, prompt(1, 2, 3), 1.0)
    if lose == "clear":
        balancer.cache_cleared(balancer.replicas["a"], 2.0)
    else:
        balancer.leave("a", 2.0)
        if lose == "rejoin":
            balancer.join(Replica("a"), 2.5)
    choice = balancer.explain(prompt(1, 2, 3), 3.0)
    assert (choice.reason, choice.resident_tokens) == (Reason.LEAST_LOADED, 0)


def test_a_holder_that_failed_just_now_is_passed_over() -> None:
    balancer = fleet(make("prefix_aware"), "ab")
    request = prompt(1, 2, 3)
    first = balancer.acquire(request, 1.0)
    first.finish(REFUSED, None, 1.1)
    request.failed = (first.replica,)
    assert balancer.acquire(request, 1.1).replica is not first.replica


def test_the_size_of_the_memory_is_a_parameter() -> None:
    for size, reason in [(4096 * 3, Reason.PREFIX), (4096 * 2, Reason.LEAST_LOADED)]:
        balancer = fleet(make("prefix_aware", {"max_tree_size": size, "cache_threshold": 0.9}), "a")
        turn(balancer, prompt(1, 2, 3), 1.0)
        assert balancer.explain(prompt(1, 2, 3), 2.0).reason is reason
        assert balancer.policy.snapshot().state == {"blocks": size // 4096}


# Nothing to compare


def test_without_blocks_the_session_directory_tells_the_holder() -> None:
    a, b, c = (Replica(i) for i in "abc")
    a.in_flight = b.in_flight = 3
    policy = make("prefix_aware")
    residents = (Resident(a, 2_000, 0, own=False), Resident(b, 8_000, 8_000))
    choice = policy.pick(Request(key=b"k", prompt_tokens=9_000, residents=residents, known=True), [a, b, c], 1.0)
    assert (choice.replica, choice.reason, choice.resident_tokens) == (b, Reason.PREFIX, 8_000)
    choice = policy.pick(Request(key=b"k", prompt_tokens=90_000, residents=residents, known=True), [a, b, c], 1.0)
    assert (choice.replica, choice.reason) == (c, Reason.LEAST_LOADED)


@pytest.mark.parametrize(("key", "reason"), [(None, Reason.NO_SESSION), (b"k", Reason.LEAST_LOADED)])
def test_with_nothing_to_go_by_it_goes_by_load(key: bytes | None, reason: Reason) -> None:
    balancer = fleet(make("prefix_aware"))
    a, b, c = balancer.ready
    a.in_flight, b.in_flight, c.in_flight = 2, 1, 2
    choice = balancer.explain(Request(key=key, prompt_tokens=500), 1.0)
    assert (choice.replica, choice.reason) == (b, reason)


# Weights


def test_load_is_counted_for_weight() -> None:
    balancer = fleet(make("prefix_aware", {"balance_abs_threshold": 2}), "")
    balancer.join(Replica("big", weight=4.0), 0.0)
    balancer.join(Replica("small", weight=1.0), 0.0)
    for n in range(20):
        balancer.acquire(prompt(n), 1.0 + n)
    assert {r.id: r.in_flight for r in balancer.ready} == {"big": 16, "small": 4}
    choice = balancer.explain(prompt(0), 30.0)
    assert choice.reason is Reason.PREFIX, "16 and 4 are even by weight"


def test_a_replica_without_weight_is_the_last_resort_even_when_it_holds_the_prompt() -> None:
    spare, other = Replica("a", weight=0.0), Replica("b", in_flight=50)
    policy = make("prefix_aware")
    balancer = fleet(policy, "")
    balancer.join(spare, 0.0)
    turn(balancer, prompt(1, 2, 3), 1.0)
    balancer.join(other, 2.0)
    assert balancer.explain(prompt(1, 2, 3), 3.0).replica is other
    balancer.leave("b", 4.0)
    assert balancer.explain(prompt(1, 2, 3), 5.0).replica is spare


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6), st.booleans()), min_size=1, max_size=60),
    st.floats(0, 1),
    st.integers(0, 4),
    st.floats(1, 3),
)
@settings(max_examples=100)
def test_the_rule_holds_whatever_came_before(
    steps: list[tuple[int, int, bool]], threshold: float, absolute: int, relative: float
) -> None:
    """Only a holder of more than the threshold, or the fewest in flight; never a holder while load is uneven."""
    given_ = {"cache_threshold": threshold, "balance_abs_threshold": absolute, "balance_rel_threshold": relative}
    balancer = fleet(make("prefix_aware", given_))
    open_leases = []
    sent: dict[str, set[tuple[int, ...]]] = {i: set() for i in "abc"}
    for n, (family, length, ends) in enumerate(steps):
        request = prompt(*(family * 100 + i for i in range(length)))
        loads = {r.id: r.in_flight for r in balancer.ready}
        most, fewest = max(loads.values()), min(loads.values())
        lease = balancer.acquire(request, float(n))
        chosen = lease.replica.id
        if lease.choice.reason is Reason.PREFIX and loads[chosen] > fewest:
            assert not (most - fewest > absolute and most > relative * fewest)
        if lease.choice.reason is Reason.PREFIX:
            reach = max(i for i in range(1, length + 1) if any(p[:i] == request.blocks[:i] for p in sent[chosen]))
            assert reach / length > threshold
        else:
            assert loads[chosen] == fewest
        sent[chosen].add(request.blocks)
        open_leases.append(lease)
        if ends:
            open_leases.pop(0).finish(DONE, None, n + 0.5)


@pytest.mark.parametrize(
    ("name", "values", "allowed"),
    [
        ("cache_threshold", [-0.1, 1.1, nan, inf], "0 to 1"),
        ("balance_abs_threshold", [-1], "0 requests or more"),
        ("balance_rel_threshold", [0.9, nan, inf], "1 or more"),
        ("max_tree_size", [4095, 0, -1], "4096"),
    ],
)
def test_a_bad_parameter_is_named(name: str, values: list[float], allowed: str) -> None:
    for value in values:
        with pytest.raises(ValueError, match=f"{name} must be .*{allowed}.*, got {value}"):
            PrefixAwareConfig(**{name: value})  # type: ignore[arg-type]
