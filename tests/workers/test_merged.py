"""The counts of several workers as one page, and what stays of those that have ended."""

from __future__ import annotations

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from policies.balancer import Balancer
from policies.round_robin import RoundRobin
from policies.types import OUTCOMES, Cause, Choice, Phase, Reason, Replica
from router.metrics import Metrics
from router.metrics.exposition import Exposition
from router.metrics.family import Merge
from router.metrics.merged import Merged, Samples
from router.metrics.table import FAMILIES
from tests.control.test_metrics import Samples as Seen
from tests.control.test_metrics import parse, total

DONE = OUTCOMES[Cause.DONE, Phase.BODY]


def metrics(ids: str = "ab") -> Metrics:
    """Of a worker that has counted nothing."""
    balancer = Balancer(RoundRobin())
    for replica_id in ids:
        balancer.join(Replica(replica_id), 0.0)
    return Metrics(balancer, lambda: 100.0)


async def take(merged: Merged, **workers: Metrics) -> None:
    for name, each in workers.items():
        merged.take(name, await Samples(each).told())


async def page(merged: Merged, *telling: str) -> Seen:
    return parse((await merged.text(telling)).decode())


async def test_one_worker_is_told_of_as_a_router_alone() -> None:
    one, merged = metrics(), Merged()
    one.outcomes[DONE] = 3
    one.durations.observe(0.3)
    one.routed(Choice(one.balancer.replicas["a"], Reason.NEW))
    await take(merged, w1=one)
    ours = (await merged.text(["w1"])).decode()
    alone = (await Exposition(one).text()).decode()
    assert sorted(_described(ours)) == sorted(_described(alone)), "names, kinds and meanings"
    assert _valued(ours) == _valued(alone)


def _described(page: str) -> list[str]:
    return [line for line in page.splitlines() if line.startswith("#")]


def _valued(page: str) -> set[str]:
    return {line for line in page.splitlines() if line.startswith("warmroute_")}


async def test_counters_and_histograms_are_added_up_and_gauges_by_their_rule() -> None:
    workers, merged = {"w1": metrics(), "w2": metrics()}, Merged()
    for number, each in enumerate(workers.values(), 1):
        each.outcomes[DONE] = number
        each.durations.observe(0.3)
        each.durations.observe(1000.0 * number)
        each.routed(Choice(each.balancer.replicas["a"], Reason.NEW))
        each.balancer.replicas["a"].in_flight = number
        each.balancer.replicas["a"].speed.factor = float(number)
    workers["w2"].config_in_force = False
    await take(merged, **workers)
    seen = await page(merged, *workers)
    assert total(seen, "warmroute_requests_total", cause="done", phase="body") == 3
    assert total(seen, "warmroute_request_seconds_count") == 4
    assert total(seen, "warmroute_request_seconds_bucket", le="0.5") == 2
    assert total(seen, "warmroute_request_seconds_sum") == 3000.6
    assert total(seen, "warmroute_choices_total", replica="a") == 2
    assert total(seen, "warmroute_in_flight_requests", replica="a") == 3
    assert total(seen, "warmroute_prefill_factor", replica="a") == 2
    assert total(seen, "warmroute_replica_state", replica="b", state="ready") == 1
    assert total(seen, "warmroute_config_in_force") == 0, "refused by one"
    assert total(seen, "process_start_time_seconds") < 1e10
    assert total(seen, "python_info") == 1


STEPS = st.tuples(st.integers(0, 2), st.integers(0, 50), st.booleans(), st.booleans())
"""A worker, requests that it counts, whether it ends then, and whether it answers when the page is made."""


@given(st.lists(STEPS, max_size=10))
@settings(max_examples=20)
def test_no_counter_falls_however_often_workers_end_or_say_nothing(steps: list[tuple[int, int, bool, bool]]) -> None:
    asyncio.run(_grows(steps))


async def _grows(steps: list[tuple[int, int, bool, bool]]) -> None:
    merged, workers, starts = Merged(), [metrics() for _ in range(3)], [0, 0, 0]
    counted, before = 0, -1.0
    await take(merged, always=metrics())
    for number, requests, ends, answers in steps:
        worker = workers[number]
        worker.outcomes[DONE] = worker.outcomes.get(DONE, 0) + requests
        for _ in range(requests):
            worker.waits.observe(0.1)
            worker.routed(Choice(worker.balancer.replicas["a"], Reason.NEW))
        counted += requests
        await take(merged, **{f"w{number}.{starts[number]}": worker})
        if ends:
            merged.end(f"w{number}.{starts[number]}")
            workers[number] = metrics()
            starts[number] += 1
            await take(merged, **{f"w{number}.{starts[number]}": workers[number]})
        seen = await page(merged, "always", *([f"w{number}.{starts[number]}"] if answers else []))
        now = total(seen, "warmroute_requests_total")
        assert now == total(seen, "warmroute_wait_seconds_count") == total(seen, "warmroute_choices_total") == counted
        assert now >= before
        before = now


async def test_what_an_ended_worker_saw_is_told_of_replicas_in_the_fleet_only_and_its_gauges_are_not() -> None:
    gone, merged = metrics("ab"), Merged()
    for name in "ab":
        gone.routed(Choice(gone.balancer.replicas[name], Reason.NEW))
        gone.balancer.replicas[name].in_flight = 7
    await take(merged, w1=gone, w2=metrics("a"))
    merged.end("w1")
    merged.end("never was")
    seen = await page(merged, "w2")
    assert total(seen, "warmroute_choices_total", replica="a") == 1
    assert total(seen, "warmroute_choices_total", replica="b") == 0, "it has left"
    assert total(seen, "warmroute_in_flight_requests") == 0
    assert total(seen, "process_cpu_seconds_total") > 0


async def test_of_a_worker_that_says_nothing_now_counts_stay_and_gauges_do_not() -> None:
    workers, merged = {"w1": metrics(), "w2": metrics()}, Merged()
    for each in workers.values():
        each.outcomes[DONE] = 5
        each.balancer.replicas["a"].in_flight = 7
    await take(merged, **workers)
    one, both = await page(merged, "w1"), await page(merged, "w1", "w2")
    assert total(one, "warmroute_requests_total") == total(both, "warmroute_requests_total") == 10
    assert total(one, "warmroute_in_flight_requests") == 7
    assert total(both, "warmroute_in_flight_requests") == 14
    assert total(one, "warmroute_workers") == 1


def test_only_gauges_are_merged_otherwise_than_by_adding_up() -> None:
    assert {family.kind for family in FAMILIES if family.merge is not Merge.SUM} == {"gauge"}
