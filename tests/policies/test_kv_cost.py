"""Facts of `kv_cost`. The tables of its origin: tests/origins/test_kv_cost.py."""

from __future__ import annotations

from collections import Counter
from math import inf, nan

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.events import Finished, Routed
from policies.kv_cost import KvCost, KvCostConfig
from policies.prefix_index import BLOCK_TOKENS
from policies.registry import make
from policies.types import Choice, Reason, Replica, Request, Resident
from tests.fakes.fleet import DONE, REFUSED, fleet, turn

BLOCK = {"block_size": BLOCK_TOKENS}
"""Costs in the blocks that prompts are made of."""


def prompt(*blocks: int, rest: int = 0) -> Request:
    return Request(blocks=blocks, prompt_tokens=len(blocks) * BLOCK_TOKENS + rest)


def costs(policy: KvCost, request: Request, replicas: list[Replica], now: float = 1.0) -> dict[str, dict[str, float]]:
    shown = policy.explain(request, replicas, now).candidates
    return {candidate.replica.id: candidate.terms for candidate in shown}


def test_a_prompt_returns_to_where_it_was_sent() -> None:
    balancer = fleet(make("kv_cost"))
    homes = [turn(balancer, prompt(n, n + 100), 1.0 + n).replica.id for n in range(12)]
    assert len(set(homes)) == 3
    for n, home in enumerate(homes):
        choice = balancer.explain(prompt(n, n + 100, n + 200), 20.0)
        assert (choice.replica.id, choice.reason, choice.resident_tokens) == (home, Reason.SCORE, 2 * BLOCK_TOKENS)


def test_the_cost_is_prefill_pending_and_new_plus_prompts_in_flight() -> None:
    policy = KvCost(KvCostConfig(**BLOCK))
    balancer = fleet(policy, "a")
    (a,) = balancer.ready
    assert costs(policy, prompt(1, 2, rest=512), [a]) == {"a": {"prefill": 2.5, "decode": 2.5, "requests": 0.0}}
    lease = balancer.acquire(prompt(1, 2, rest=512), 1.0)
    seen = costs(policy, prompt(1, 2, 3), [a])
    assert seen == {"a": {"prefill": 2.5 + 3 - 2, "decode": 2.5 + 1, "requests": 0.0}}, "two blocks are shared"
    lease.first_token(2.0)
    assert costs(policy, prompt(1, 2, 3), [a]) == {"a": {"prefill": 1.0, "decode": 3.5, "requests": 0.0}}
    lease.finish(DONE, None, 3.0)
    assert costs(policy, prompt(1, 2, 3), [a]) == {"a": {"prefill": 1.0, "decode": 3.0, "requests": 0.0}}


def test_the_size_of_a_block_is_the_unit_of_the_cost() -> None:
    for size in (16, 64):
        terms = costs(KvCost(KvCostConfig(block_size=size)), prompt(1), [Replica("a")])["a"]
        assert terms["prefill"] == terms["decode"] == BLOCK_TOKENS / size


def test_requests_of_one_prompt_share_its_blocks_until_the_last_ends() -> None:
    policy = KvCost(KvCostConfig(**BLOCK))
    balancer = fleet(policy, "a")
    (a,) = balancer.ready
    leases = [balancer.acquire(prompt(1, 2, n), 1.0) for n in (3, 4, 4)]
    in_flight = [costs(policy, prompt(), [a])["a"]["decode"]]
    for lease in leases:
        lease.finish(DONE, None, 2.0)
        in_flight.append(costs(policy, prompt(), [a])["a"]["decode"])
    assert in_flight == [4.0, 3.0, 3.0, 0.0]


def test_a_hundred_thousand_tokens_in_decoding_push_a_session_off_its_cache() -> None:
    """How adding blocks of unlike cost can be wrong: those in decoding slow nobody by as much as a prefill would."""
    balancer = fleet(make("kv_cost"), "ab")
    session = tuple(range(50))
    home = turn(balancer, prompt(*session), 1.0).replica
    other = next(r for r in balancer.ready if r is not home)
    neighbour = prompt(*range(1000, 1110))
    neighbour.failed = (other,)
    lease = balancer.acquire(neighbour, 2.0)
    lease.first_token(3.0)
    assert lease.replica is home
    choice = balancer.explain(prompt(*session, 50), 4.0)
    assert (choice.replica, choice.resident_tokens) == (other, 0)


def test_blocks_count_until_the_ttl_has_passed_since_their_last_use() -> None:
    balancer = fleet(make("kv_cost", {"router_ttl_secs": 10.0}), "ab")
    home = turn(balancer, prompt(1, 2, 3), 0.0).replica
    assert balancer.explain(prompt(1, 2, 3), 10.0).resident_tokens == 3 * BLOCK_TOKENS
    assert balancer.explain(prompt(1, 2, 3), 10.5).resident_tokens == 0
    assert turn(balancer, prompt(1, 2, 3), 8.0).replica is home
    assert balancer.explain(prompt(1, 2, 3), 17.0).resident_tokens == 3 * BLOCK_TOKENS


def test_the_size_of_the_memory_is_a_parameter() -> None:
    balancer = fleet(make("kv_cost", {"router_max_tree_size": 5}), "a")
    for n in range(9):
        turn(balancer, prompt(n, n + 100), 1.0 + n)
    assert balancer.policy.snapshot().state == {"blocks": 5, "requests": 0}


def test_credit_zero_ignores_caches() -> None:
    replicas = [Replica("a"), Replica("b", prefill_tokens=1)]
    policy = KvCost(KvCostConfig(overlap_score_credit=0.0))
    policy.observe(Routed(0.0, prompt(1, 2), Choice(replicas[1], Reason.SCORE)))
    policy.observe(Finished(0.0, prompt(1, 2), replicas[1], DONE, None))
    assert policy.pick(prompt(1, 2), replicas, 1.0).replica is replicas[0]


def test_what_is_cached_makes_no_prefill_less_than_nothing() -> None:
    policy = KvCost(KvCostConfig(overlap_score_credit=3.0))
    balancer = fleet(policy, "a")
    turn(balancer, prompt(1, 2), 0.0)
    assert costs(policy, prompt(1, 2), list(balancer.ready))["a"]["prefill"] == 0.0


def test_the_chosen_one_is_shown_however_dear_it_is() -> None:
    replicas = [Replica(f"r{n}", prefill_tokens=n * 1000) for n in range(12)]
    policy = KvCost(KvCostConfig(router_temperature=50.0))
    chosen = set()
    for n in range(60):
        choice = policy.explain(prompt(n), replicas, 1.0)
        assert choice.replica in [candidate.replica for candidate in choice.candidates]
        assert len(choice.candidates) == 5
        assert [c.cost for c in choice.candidates] == sorted(c.cost for c in choice.candidates)
        chosen.add(choice.replica.id)
        policy.observe(Routed(1.0, Request(), choice))
    assert len(chosen) > 8, "at so high a temperature all are about as likely"


def test_equal_costs_are_settled_by_lot_that_repeats_with_its_seed() -> None:
    draws = []
    for seed in (1, 1, 2):
        balancer = fleet(make("kv_cost", {"seed": seed}), "abcd")
        draws.append([turn(balancer, prompt(n), 0.0).replica.id for n in range(1000)])
    assert draws[0] == draws[1] != draws[2]
    counts = Counter(draws[0])
    chi_square = sum((counts[i] - 250) ** 2 / 250 for i in "abcd")
    assert chi_square < 16.27  # 0.999 quantile, 3 degrees of freedom


def test_no_lot_is_drawn_at_temperature_zero_when_one_is_cheapest() -> None:
    replicas = [Replica("a", prefill_tokens=100), Replica("b", prefill_tokens=99), Replica("c", prefill_tokens=100)]
    policy = make("kv_cost")
    for n in range(50):
        request = prompt(n)
        assert policy.pick(request, replicas, 1.0).replica.id == "b"
        policy.observe(Routed(1.0, request, Choice(replicas[1], Reason.SCORE)))
        policy.observe(Finished(1.0, request, replicas[1], DONE, None))


@pytest.mark.parametrize("lose", ["leave", "clear"])
def test_a_lost_cache_is_forgotten(lose: str) -> None:
    balancer = fleet(make("kv_cost"), "a")
    turn(balancer, prompt(1, 2), 1.0)
    if lose == "leave":
        balancer.leave("a", 2.0)
        balancer.join(Replica("a"), 2.5)
    else:
        balancer.cache_cleared(balancer.replicas["a"], 2.0)
    assert balancer.explain(prompt(1, 2), 3.0).resident_tokens == 0


def test_leases_that_outlive_their_replica_leave_nothing_behind() -> None:
    policy = KvCost(KvCostConfig(**BLOCK))
    balancer = fleet(policy, "a")
    lease = balancer.acquire(prompt(1, 2), 1.0)
    balancer.join(Replica("a"), 2.0)
    lease.finish(REFUSED, None, 3.0)
    (successor,) = balancer.ready
    assert costs(policy, prompt(), [successor])["a"] == {"prefill": 0.0, "decode": 0.0, "requests": 0.0}
    assert policy.snapshot().state == {"blocks": 0, "requests": 0}


def test_a_replica_that_left_leaves_nothing_behind_even_with_leases_open() -> None:
    balancer = fleet(make("kv_cost"), "ab")
    for n in range(6):
        balancer.acquire(prompt(n), 1.0)
    for replica_id in "ab":
        balancer.leave(replica_id, 2.0)
    assert balancer.policy.snapshot().state == {"blocks": 0, "requests": 0}


def test_a_request_sent_twice_at_once_to_one_replica_counts_once_and_leaves_nothing_behind() -> None:
    policy = KvCost(KvCostConfig(**BLOCK))
    balancer = fleet(policy, "a")
    request = prompt(1, 2)
    leases = [balancer.acquire(request, 1.0) for _ in range(2)]
    assert costs(policy, prompt(), list(balancer.ready))["a"]["decode"] == 2.0
    for lease in leases:
        lease.finish(DONE, None, 2.0)
    assert costs(policy, prompt(), list(balancer.ready))["a"]["decode"] == 0.0


def test_requests_routed_before_it_was_in_charge_are_none_of_its_business() -> None:
    balancer = fleet(make("round_robin"), "a")
    lease = balancer.acquire(prompt(1, 2), 1.0)
    policy = KvCost(KvCostConfig(**BLOCK))
    balancer.switch(policy, 2.0)
    lease.finish(DONE, None, 3.0)
    assert costs(policy, prompt(), list(balancer.ready))["a"]["decode"] == 0.0


def test_without_blocks_the_session_directory_tells_what_is_cached() -> None:
    a, b = Replica("a"), Replica("b")
    request = Request(key=b"k", prompt_tokens=8_000, residents=(Resident(b, 4_000, 0),), known=True)
    policy = KvCost(KvCostConfig(block_size=1))
    choice = policy.explain(request, [a, b], 1.0)
    assert (choice.replica, choice.reason, choice.resident_tokens) == (b, Reason.SCORE, 4_000)
    assert [candidate.cost for candidate in choice.candidates] == [12_000, 16_000]


def test_a_request_with_nothing_to_go_by_goes_by_load() -> None:
    replicas = [Replica("a", in_flight=2), Replica("b", in_flight=1, prefill_tokens=9), Replica("c", in_flight=2)]
    choice = make("kv_cost").pick(Request(prompt_tokens=500), replicas, 1.0)
    assert (choice.replica.id, choice.reason) == ("b", Reason.NO_SESSION)


def test_the_cost_is_for_the_weight_and_one_without_is_the_last_resort() -> None:
    spare, small, big = (
        Replica("a", 0.0),
        Replica("b", 1.0, prefill_tokens=1000),
        Replica("c", 4.0, prefill_tokens=9000),
    )
    policy = make("kv_cost")
    assert policy.pick(prompt(1), [spare, small, big], 1.0).replica is big, "11,048 tokens for 4 are less than 3,048"
    big.prefill_tokens = 12_000
    assert policy.pick(prompt(1), [spare, small, big], 1.0).replica is small
    assert policy.pick(prompt(1), [spare], 1.0).replica is spare


_family = st.tuples(st.integers(0, 3), st.integers(0, 6))


@given(st.lists(st.tuples(_family, st.booleans(), st.booleans()), max_size=40), _family)
@settings(max_examples=150)
def test_blocks_in_flight_are_counted_once_each_whatever_came_and_went(
    steps: list[tuple[tuple[int, int], bool, bool]], asked: tuple[int, int]
) -> None:
    def of(family: int, length: int) -> Request:
        return prompt(*(family * 100 + i for i in range(length)), rest=family)

    policy = KvCost(KvCostConfig(block_size=1))
    balancer = fleet(policy, "a")
    leases = []
    for n, ((family, length), begins, ends) in enumerate(steps):
        leases.append(balancer.acquire(of(family, length), float(n)))
        if begins:
            leases[0].first_token(float(n))
        if ends:
            leases.pop(0).finish(DONE, None, float(n))
    request = of(*asked)
    blocks = {block for lease in leases for block in lease.request.blocks} | set(request.blocks)
    rest = sum(lease.request.prompt_tokens % BLOCK_TOKENS for lease in leases) + request.prompt_tokens % BLOCK_TOKENS
    terms = costs(policy, request, list(balancer.ready), 50.0)["a"]
    assert terms["decode"] == len(blocks) * BLOCK_TOKENS + rest
    (replica,) = balancer.ready
    assert replica.prefill_tokens <= terms["prefill"] <= replica.prefill_tokens + request.prompt_tokens


@pytest.mark.parametrize(
    "name",
    [
        "overlap_score_credit",
        "overlap_score_credit_decay",
        "prefill_load_scale",
        "decode_active_request_weight",
        "router_temperature",
    ],
)
@pytest.mark.parametrize("value", [-0.1, nan, inf])
def test_a_bad_factor_is_named(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} must be 0 or more and finite, got {value}"):
        KvCostConfig(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("router_ttl_secs", 0.0, "more than 0 seconds"),
        ("router_ttl_secs", nan, "more than 0 seconds"),
        ("router_ttl_secs", inf, "finite"),
        ("router_max_tree_size", 0, "1 block or more"),
        ("block_size", 0, "1 token or more"),
    ],
)
def test_a_bad_bound_is_named(name: str, value: float, allowed: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be .*{allowed}.*, got {value}"):
        KvCostConfig(**{name: value})  # type: ignore[arg-type]
