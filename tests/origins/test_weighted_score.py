"""`weighted_score` against its origin: llm-d's router with its chart's default blend.

The scores are those its own tests hold (pkg/epp/framework/plugins/scheduling/scorer of llm-d-router, May 2026:
`TestQueueScorer`, `TestPrefixPluginScore`, and the formula in the README of each scorer); how they are summed is its
scheduler's (`runScorerPlugins`: each within 0 to 1, times its weight) with the weights of the chart, 2, 2 and 3; a
blend is worked by hand. Known to differ:

- What is compared are blocks of 4 KiB of the raw body, where llm-d has 64 tokens; its first 131,072 tokens count, here
  the first 4 MiB. Here a prompt's end is forgotten before its beginning; there, in the order in which it was added.
- llm-d reads its engines' metrics every 50 ms, and an engine that tells nothing has an empty queue and a free cache.
  Here it has our own requests for a queue, and is as full as the fullest.
"""

from __future__ import annotations

import pytest

from policies.events import Routed
from policies.prefix_index import BLOCK_TOKENS
from policies.registry import make
from policies.types import Choice, Load, Reason, Replica, Request
from policies.weighted_score import SCORERS, WeightedScore, WeightedScoreConfig

QUEUE, KV_CACHE, PREFIX = SCORERS


def prompt(*blocks: int) -> Request:
    return Request(blocks=blocks, prompt_tokens=len(blocks) * BLOCK_TOKENS)


def scores(replicas: list[Replica], matched: list[int], total: int) -> list[dict[str, float]]:
    """Each replica's scores without weights, for a prompt of `total` blocks of which they hold `matched`."""
    weights = WeightedScoreConfig(queue_scorer=1.0, kv_cache_utilization_scorer=1.0, prefix_cache_scorer=1.0)
    policy = WeightedScore(weights)
    for replica, held in zip(replicas, matched, strict=True):
        policy.observe(Routed(0.0, prompt(*range(held)), Choice(replica, Reason.SCORE)))
    shown = policy.explain(prompt(*range(total)), replicas, 0.0).candidates
    by_id = {c.replica.id: {name: -term for name, term in c.terms.items()} for c in shown}
    return [by_id[replica.id] for replica in replicas]


@pytest.mark.parametrize(
    ("waiting", "expected"), [([10, 5, 0], [0.0, 0.5, 1.0]), ([5, 5], [1.0, 1.0]), ([0, 0], [1.0, 1.0])]
)
def test_the_queue_is_scored_as_there(waiting: list[int], expected: list[float]) -> None:
    replicas = [Replica(str(n), load=Load(0.0, waiting=queue)) for n, queue in enumerate(waiting)]
    assert [found[QUEUE] for found in scores(replicas, [0] * len(replicas), 4)] == expected


def test_the_prefix_is_scored_as_there() -> None:
    replicas = [Replica("pod1"), Replica("pod2")]
    assert [found[PREFIX] for found in scores(replicas, [5, 2], 10)] == [0.5, 0.2]


def test_the_cache_is_scored_as_there() -> None:
    """1 - kvCacheUsagePercent."""
    replicas = [
        Replica(str(n), load=Load(0.0, used_tokens=used, capacity_tokens=100_000))
        for n, used in enumerate([80_000, 50_000, 0])
    ]
    assert [found[KV_CACHE] for found in scores(replicas, [0] * 3, 4)] == pytest.approx([0.2, 0.5, 1.0])


def test_a_blend_worked_by_hand() -> None:
    """Three pods with 4, 1 and 0 waiting, 90 %, 40 % and 60 % of the cache used, and 8, 2 and 0 of 10 blocks matched:

    pod-a  2 * 0/4 + 2 * 0.1 + 3 * 0.8 = 2.6
    pod-b  2 * 3/4 + 2 * 0.6 + 3 * 0.2 = 3.3
    pod-c  2 * 4/4 + 2 * 0.4 + 3 * 0.0 = 2.8
    """
    policy = make("weighted_score")
    replicas = []
    for name, waiting, used, held in [("pod-a", 4, 90, 8), ("pod-b", 1, 40, 2), ("pod-c", 0, 60, 0)]:
        load = Load(0.0, waiting=waiting, used_tokens=used * 1000, capacity_tokens=100_000)
        replicas.append(Replica(name, load=load))
        policy.observe(Routed(0.0, prompt(*range(held)), Choice(replicas[-1], Reason.SCORE)))
    choice = policy.explain(prompt(*range(10)), replicas, 1.0)
    assert [(c.replica.id, round(-c.cost, 9)) for c in choice.candidates] == [
        ("pod-b", 3.3),
        ("pod-c", 2.8),
        ("pod-a", 2.6),
    ]
    assert policy.pick(prompt(*range(10)), replicas, 1.0).replica.id == choice.replica.id == "pod-b"


def test_the_defaults_are_the_charts() -> None:
    """config/charts/routerlib/templates/_config.yaml, and the approximate prefix producer's README."""
    assert WeightedScoreConfig() == WeightedScoreConfig(2.0, 2.0, 3.0, 31_250)
