"""`kv_cost` against the worked examples of its origin, NVIDIA Dynamo's KV router.

The first is in its documentation (docs/architecture/kv_cache_routing.md of 2025, "Worker Selection"; the later
"Routing Concepts" shows the same three workers); the others are the cases of its own tests (lib/kv-router,
`scheduling/selector/default.rs` of 2026). Prompts, blocks and states are set up as events would, and the costs are
compared number by number. Two things are ours:

- The documented example leaves the request's own blocks out of the blocks in decoding; Dynamo's formula of today counts
  them, on every worker alike, and so do we: ten more each, and the order stays.
- A prompt's blocks are 4 KiB of its raw body, about 1,000 tokens, where Dynamo has pages of tokens. Here a page is set
  to be as large as a block, so that the examples' numbers hold as they are.
"""

from __future__ import annotations

from collections import Counter
from math import exp
from typing import Any

import pytest

from policies.events import Finished, Routed
from policies.kv_cost import KvCost, KvCostConfig
from policies.prefix_index import BLOCK_TOKENS
from policies.types import Choice, Reason, Replica, Request
from tests.fakes.fleet import DONE


def prompt(blocks: range) -> Request:
    return Request(blocks=tuple(blocks), prompt_tokens=len(blocks) * BLOCK_TOKENS)


class Worker:
    """What the examples say of a worker, in blocks."""

    def __init__(self, cached: int = 0, decode: int = 0, prefill: int = 0, requests: int = 0) -> None:
        self.cached, self.decode = cached, decode
        self.prefill, self.requests = prefill, requests


def weigh(
    workers: list[Worker], size: int, draws: int = 0, **parameters: Any
) -> tuple[KvCost, Request, list[Replica], list[float]]:
    """The policy, a request of `size` blocks, the workers as replicas, and the cost of each."""
    policy = KvCost(KvCostConfig(block_size=BLOCK_TOKENS, **parameters))
    replicas = []
    for n, worker in enumerate(workers):
        replica = Replica(str(n), in_flight=worker.requests, prefill_tokens=worker.prefill * BLOCK_TOKENS)
        replicas.append(replica)
        known = prompt(range(worker.cached))  # was sent there, and is done
        policy.observe(Routed(0.0, known, Choice(replica, Reason.SCORE)))
        policy.observe(Finished(0.0, known, replica, DONE, None))
        if worker.decode:  # others', in flight
            start = 10_000 * (n + 1)
            policy.observe(Routed(0.0, prompt(range(start, start + worker.decode)), Choice(replica, Reason.SCORE)))
    request = prompt(range(size))
    shown = policy.explain(request, replicas, 1.0).candidates
    found = {candidate.replica.id: candidate.cost for candidate in shown}
    return policy, request, replicas, [found[replica.id] for replica in replicas]


def test_the_example_of_the_documentation() -> None:
    """Ten blocks; of three workers the first has 2 cached and 10 in decoding, the second 5 and 5, the third 8 and 9."""
    workers = [Worker(cached=2, decode=10), Worker(cached=5, decode=5), Worker(cached=8, decode=9)]
    policy, request, replicas, costs = weigh(workers, size=10)
    documented = [1.0 * 8 + 10, 1.0 * 5 + 5, 1.0 * 2 + 9]
    assert documented == [18, 10, 11]
    assert costs == [cost + 10 for cost in documented]
    assert policy.pick(request, replicas, 1.0).replica is replicas[1]


@pytest.mark.parametrize(("weight", "selected"), [(0.0, 1), (1.0, 1), (1.5, 2), (4.0, 2)])
def test_a_higher_weight_favours_caches_and_a_lower_one_even_load(weight: float, selected: int) -> None:
    """The same example with other weights: 8w + 10, 5w + 5 and 2w + 9."""
    workers = [Worker(cached=2, decode=10), Worker(cached=5, decode=5), Worker(cached=8, decode=9)]
    policy, request, replicas, costs = weigh(workers, size=10, prefill_load_scale=weight)
    assert costs == [weight * 8 + 20, weight * 5 + 15, weight * 2 + 19]
    assert policy.pick(request, replicas, 1.0).replica is replicas[selected]


def test_the_scale_applies_after_the_credit() -> None:
    """`test_prefill_load_scale_applies_after_overlap_credits`: 2 * (4 - 2) + 3 against 2 * 4."""
    policy, request, replicas, costs = weigh([Worker(cached=2, decode=3), Worker()], size=4, prefill_load_scale=2.0)
    assert costs == [7.0 + 4, 8.0 + 4]
    assert policy.pick(request, replicas, 1.0).replica is replicas[0]


@pytest.mark.parametrize(("credit", "warm", "selected"), [(1.0, 9.0, 1), (1.5, 7.0, 0)])
def test_a_credit_above_one_prefers_the_cached(credit: float, warm: float, selected: int) -> None:
    """`test_overlap_credit_above_one_can_prefer_colocated_worker`: 8 - 4c + 5 against 8."""
    policy, request, replicas, costs = weigh(
        [Worker(cached=4, decode=5), Worker()], size=8, overlap_score_credit=credit
    )
    assert costs == [warm + 8, 8.0 + 8]
    assert policy.pick(request, replicas, 1.0).replica is replicas[selected]


@pytest.mark.parametrize(("weight", "cost"), [(0.0, 100.0), (32.0, 228.0)])
def test_active_requests_can_be_charged(weight: float, cost: float) -> None:
    """`test_worker_logit_can_charge_active_requests`: 100 blocks and four requests."""
    *_, costs = weigh([Worker(decode=100, requests=4)], size=0, decode_active_request_weight=weight)
    assert costs == [cost]


@pytest.mark.parametrize(("decay", "warm", "selected"), [(0.0, 3.0, 0), (1.0, 7.0 - 4.0 / 1.75, 1)])
def test_the_credit_decays_with_prefill_beyond_the_least(decay: float, warm: float, selected: int) -> None:
    """`test_overlap_credit_decay_can_prefer_less_loaded_cold_worker`: 3 + 4 - 4 / (1 + d * 3/4) against 4."""
    policy, request, replicas, costs = weigh(
        [Worker(cached=4, prefill=3), Worker()], size=4, overlap_score_credit_decay=decay
    )
    assert costs == pytest.approx([warm + 4, 4.0 + 4])
    assert policy.pick(request, replicas, 1.0).replica is replicas[selected]


def test_the_temperature_is_of_costs_over_their_range() -> None:
    """Softmax of -(cost - least) / (most - least) / temperature, drawn 4,000 times: for 18, 10 and 11 at 0.5 the odds
    are exp(-2), 1 and exp(-1/4).
    """
    workers = [Worker(cached=2, decode=10), Worker(cached=5, decode=5), Worker(cached=8, decode=9)]
    policy, request, replicas, _ = weigh(workers, size=10, router_temperature=0.5)
    counts: Counter[str] = Counter()
    for _ in range(4_000):
        choice = policy.pick(request, replicas, 1.0)
        counts[choice.replica.id] += 1
        empty = Request()  # the next draw, and nothing else
        policy.observe(Routed(1.0, empty, choice))
        policy.observe(Finished(1.0, empty, choice.replica, DONE, None))
    odds = [exp(-2.0), 1.0, exp(-0.25)]
    expected = [4_000 * chance / sum(odds) for chance in odds]
    chi_square = sum((counts[str(n)] - mean) ** 2 / mean for n, mean in enumerate(expected))
    assert chi_square < 13.82  # 0.999 quantile, 2 degrees of freedom
