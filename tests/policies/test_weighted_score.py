"""Facts of `weighted_score`. The scores of its origin: tests/origins/test_weighted_score.py."""

from __future__ import annotations

from collections import Counter
from math import inf, nan
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.cost import REPORT_MAX_AGE_S
from policies.events import Routed
from policies.prefix_index import BLOCK_TOKENS
from policies.registry import make
from policies.types import Choice, Load, Reason, Replica, Request, Resident
from policies.weighted_score import WeightedScoreConfig
from tests.fakes.fleet import fleet, turn


def prompt(*blocks: int, rest: int = 0) -> Request:
    return Request(blocks=blocks, prompt_tokens=len(blocks) * BLOCK_TOKENS + rest)


ROOM = 16 * BLOCK_TOKENS
"""Tokens that fit each replica that reports."""


def loaded(replica_id: str, waiting: int | None = 0, used: int | None = 0, at: float = 0.0, **more: Any) -> Replica:
    """A replica that reported."""
    return Replica(replica_id, load=Load(at, waiting=waiting, used_tokens=used, capacity_tokens=ROOM), **more)


def test_a_prompt_returns_to_where_it_was_sent() -> None:
    balancer = fleet(make("weighted_score"))
    homes = [turn(balancer, prompt(n, n + 100), 1.0 + n).replica.id for n in range(12)]
    assert len(set(homes)) == 3
    for n, home in enumerate(homes):
        choice = balancer.explain(prompt(n, n + 100, n + 200), 20.0)
        assert (choice.replica.id, choice.reason, choice.resident_tokens) == (home, Reason.SCORE, 2 * BLOCK_TOKENS)


def test_the_shortest_queue_gets_a_new_prompt() -> None:
    replicas = [loaded("a", 3), loaded("b", 1), loaded("c", 2)]
    policy = make("weighted_score")
    for n in range(20):
        assert policy.pick(prompt(n), replicas, 1.0).replica.id == "b"


def test_the_freest_cache_gets_a_new_prompt() -> None:
    replicas = [loaded("a", used=400), loaded("b", used=300), loaded("c", used=ROOM)]
    assert make("weighted_score").pick(prompt(1), replicas, 1.0).replica.id == "b"


def test_one_more_waiting_request_outweighs_two_thirds_of_a_prompt() -> None:
    """How min-max normalisation can be wrong: the queue's whole weight goes to a difference of one."""
    for held, expected in [(6, "b"), (7, "a")]:
        policy = make("weighted_score")
        a = turn(fleet(policy, "a"), prompt(*range(held)), 0.0).replica
        a.load = Load(0.0, waiting=1)
        assert policy.pick(prompt(*range(10)), [a, loaded("b", 0)], 1.0).replica.id == expected


def test_equals_are_settled_by_lot_that_repeats_with_its_seed() -> None:
    draws = []
    for seed in (1, 1, 2):
        balancer = fleet(make("weighted_score", {"seed": seed}), "abcd")
        draws.append([turn(balancer, prompt(n), 0.0).replica.id for n in range(1000)])
    assert draws[0] == draws[1] != draws[2]
    counts = Counter(draws[0])
    chi_square = sum((counts[i] - 250) ** 2 / 250 for i in "abcd")
    assert chi_square < 16.27  # 0.999 quantile, 3 degrees of freedom


def test_weights_are_parameters() -> None:
    replicas = [loaded("a", 0, 9000), loaded("b", 9, 100)]
    for name, expected in [("queue_scorer", "a"), ("kv_cache_utilization_scorer", "b")]:
        assert make("weighted_score", {name: 20.0}).pick(prompt(1), replicas, 1.0).replica.id == expected


def test_missing_and_old_reports_are_not_idleness() -> None:
    for silent in (Replica("b"), loaded("b", None, None), loaded("b", 0, 0, at=-REPORT_MAX_AGE_S)):
        silent.in_flight = 4
        choice = make("weighted_score").explain(prompt(1), [loaded("a", 3, ROOM // 2), silent, loaded("c", 3, 0)], 1.0)
        terms = {candidate.replica.id: candidate.terms for candidate in choice.candidates}
        assert terms["b"]["queue-scorer"] == 0.0, "our own four in flight are the longest queue known"
        assert terms["b"]["kv-cache-utilization-scorer"] == -1.0, "as the fullest of those that tell"
        assert choice.replica.id == "c"


def test_with_no_report_at_all_own_requests_are_the_queue() -> None:
    replicas = [Replica("a", in_flight=2), Replica("b", in_flight=1), Replica("c", in_flight=3)]
    assert make("weighted_score").pick(prompt(1), replicas, 1.0).replica.id == "b"


@pytest.mark.parametrize(("capacity", "kept"), [(None, 31_250 * 16 // 1024), (10 * BLOCK_TOKENS, 10), (1, 1)])
def test_what_is_remembered_of_a_replica_is_what_fits_it(capacity: int | None, kept: int) -> None:
    policy = make("weighted_score")
    balancer = fleet(policy, "a")
    balancer.replicas["a"].load = Load(0.0, capacity_tokens=capacity)
    turn(balancer, prompt(*range(600)), 1.0)
    assert policy.snapshot().state == {"blocks": kept}
    assert balancer.explain(prompt(*range(600)), 2.0).resident_tokens == kept * BLOCK_TOKENS


def test_a_lost_cache_is_forgotten() -> None:
    balancer = fleet(make("weighted_score"), "a")
    turn(balancer, prompt(1, 2), 1.0)
    balancer.cache_cleared(balancer.replicas["a"], 2.0)
    assert balancer.explain(prompt(1, 2), 3.0).resident_tokens == 0


def test_without_blocks_the_session_directory_tells_the_part() -> None:
    a, b = Replica("a"), Replica("b")
    request = Request(key=b"k", prompt_tokens=8_000, residents=(Resident(b, 4_000, 0),), known=True)
    choice = make("weighted_score").explain(request, [a, b], 1.0)
    assert (choice.replica, choice.reason, choice.resident_tokens) == (b, Reason.SCORE, 4_000)
    assert [candidate.terms["prefix-cache-scorer"] for candidate in choice.candidates] == [-1.5, 0.0]


def test_a_request_with_nothing_to_go_by_goes_by_load() -> None:
    replicas = [Replica("a", in_flight=2), Replica("b", in_flight=1), Replica("c", in_flight=2)]
    choice = make("weighted_score").pick(Request(prompt_tokens=500), replicas, 1.0)
    assert (choice.replica.id, choice.reason) == ("b", Reason.NO_SESSION)


def test_a_replica_without_weight_is_the_last_resort() -> None:
    spare, busy = loaded("a", weight=0), loaded("b", 90, ROOM)
    policy = make("weighted_score")
    assert policy.pick(prompt(1), [spare, busy], 1.0).replica is busy
    assert policy.pick(prompt(1), [spare], 1.0).replica is spare


_reports = st.tuples(st.none() | st.integers(0, 50), st.none() | st.integers(0, 2 * ROOM))


@given(st.lists(_reports, min_size=1, max_size=9), st.integers(0, 8))
@settings(max_examples=200)
def test_the_best_sum_wins_and_is_shown(reports: list[tuple[int | None, int | None]], held: int) -> None:
    policy = make("weighted_score")
    replicas = [loaded(f"r{n}", waiting, used) for n, (waiting, used) in enumerate(reports)]
    policy.observe(Routed(0.0, prompt(*range(held)), Choice(replicas[0], Reason.SCORE)))
    choice = policy.explain(prompt(*range(8)), replicas, 1.0)
    shown = choice.candidates
    assert len(shown) == min(5, len(replicas))
    assert [c.cost for c in shown] == sorted(c.cost for c in shown)
    assert next(c for c in shown if c.replica is choice.replica).cost == shown[0].cost
    for candidate in shown:
        assert candidate.cost == pytest.approx(sum(candidate.terms.values()))
        for (name, term), weight in zip(candidate.terms.items(), (2.0, 2.0, 3.0), strict=True):
            assert -weight <= term <= 0.0, name
    assert policy.pick(prompt(*range(8)), replicas, 1.0).replica is choice.replica


@pytest.mark.parametrize("name", ["queue_scorer", "kv_cache_utilization_scorer", "prefix_cache_scorer"])
@pytest.mark.parametrize("value", [-0.1, nan, inf])
def test_a_bad_weight_is_named(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} must be a weight of 0 or more and finite, got {value}"):
        WeightedScoreConfig(**{name: value})  # type: ignore[arg-type]


def test_a_bad_capacity_is_named() -> None:
    with pytest.raises(ValueError, match="lru_capacity_per_server must be 1 block or more, got 0"):
        WeightedScoreConfig(lru_capacity_per_server=0)
