"""What is counted: the exposition against what was done, and against what the operations page promises."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from policies.balancer import Balancer
from policies.registry import POLICIES
from policies.round_robin import RoundRobin
from policies.types import Cause, Choice, Phase, Reason, Replica, State
from router.metrics import SECONDS, Histogram, Metrics
from sim.emulator import Emulator, EmulatorConfig
from tests.fakes.process import ROOT, Router, free_port, start_router
from tests.fakes.waiting import until

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]

JSON = {"content-type": "application/json"}

CLOSED = {
    "cause": set(Cause),
    "phase": set(Phase),
    "state": set(State),
    "kind": {"elsewhere", "evicted"},
    "role": {"live", "shadow"},
    "policy": set(POLICIES),
    "shadow_reason": set(Reason),
    "same": {"true", "false"},
    "why": {"connect", "connect_timeout", "reset", "silent", "invalid", "busy", "queue_full"},
}
"""Labels whose values are a closed set wherever they stand; `why` as the operations page tells."""


def parse(text: str) -> Samples:
    """Every sample by its name and labels. A sample told twice is an error."""
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in found, f"{key} twice"
            found[key] = sample.value
    return found


def total(samples: Samples, name: str, **labels: str) -> float:
    """The sum over all samples of that name that carry these labels."""
    wanted = labels.items()
    return sum(value for (found, carried), value in samples.items() if found == name and wanted <= set(carried))


@dataclass
class Served:
    router: Router
    replica: Emulator
    dead_url: str

    async def samples(self) -> Samples:
        async with httpx.AsyncClient(base_url=self.router.admin_url, trust_env=False) as client:
            return parse((await client.get("/metrics")).raise_for_status().text)

    async def counted(self, requests: int) -> Samples:
        """The samples once so many requests have ended: the last answer may be read before its end is counted."""
        return await until(
            self.samples, lambda seen: total(seen, "warmroute_requests_total") == requests, 10, f"{requests} requests"
        )


def chat(text: str, *, stream: bool = True) -> dict[str, object]:
    return {"model": "m", "stream": stream, "max_tokens": 4, "messages": [{"role": "user", "content": text}]}


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    """A router before an emulated replica and a port where none is, which no probe finds out."""
    dead_url = f"http://127.0.0.1:{free_port()}"
    config = tmp_path / "c.yaml"
    config.write_text(
        "health: {fail_after: 1000000, passive_fail_after: 1000000}\n"
        "policy: {name: round_robin, shadow: session_affinity}\n"
    )
    async with Emulator(EmulatorConfig(time_scale=0.01, default_include_usage=True)) as replica:
        urls = [replica.url, dead_url]
        router = await asyncio.to_thread(start_router, urls, tmp_path / "router.log", "--config", str(config))
        yield Served(router, replica, dead_url)
        await asyncio.to_thread(router.stop)


async def test_counters_match_what_was_done(served: Served) -> None:
    headers = JSON | {"x-session-affinity": "hush-hush"}
    prompt = tokens = cached = sent = received = 0
    async with httpx.AsyncClient(base_url=served.router.url, trust_env=False, headers=headers) as client:
        for i in range(6):
            body = json.dumps(chat("word " * 200, stream=i % 2 == 0)).encode()
            received += len(body)
            answer = await client.post("/v1/chat/completions", content=body)
            assert answer.status_code == 200
            sent += len(answer.content)
            last = answer.text if i % 2 else answer.text.split("data: ")[-2]
            usage = json.loads(last)["usage"]
            prompt += usage["prompt_tokens"]
            tokens += usage["completion_tokens"]
            cached += usage["prompt_tokens_details"]["cached_tokens"]
        assert (await client.post("/flush_cache")).status_code == 403
        async with client.stream("GET", "/v1/models") as models:
            await models.aread()
    seen = await served.counted(8)
    alive = served.replica.url
    assert total(seen, "warmroute_requests_total", cause="done", phase="body") == 7
    assert total(seen, "warmroute_requests_total", cause="client", phase="queue") == 1, "the refused one"
    assert total(seen, "warmroute_refusals_total", reason="admin_path") == total(seen, "warmroute_refusals_total") == 1
    assert total(seen, "warmroute_prompt_tokens_total", replica=alive) == prompt
    assert total(seen, "warmroute_cached_tokens_total", replica=alive) == cached > 0
    assert total(seen, "warmroute_completion_tokens_total", replica=alive) == tokens
    assert total(seen, "warmroute_received_bytes_total") == received
    assert total(seen, "warmroute_sent_bytes_total") > sent
    assert total(seen, "warmroute_first_byte_seconds_count") == 7, "the refused one has none"
    assert total(seen, "warmroute_request_seconds_count") == 8
    assert total(seen, "warmroute_choices_total", replica=alive) == 7
    redispatched = total(seen, "warmroute_choices_total", replica=served.dead_url)
    assert redispatched > 0, "round robin tries the dead one too"
    assert total(seen, "warmroute_redispatches_total", why="connect") == redispatched
    assert total(seen, "warmroute_in_flight_requests") == total(seen, "warmroute_pending_prefill_tokens") == 0
    for replica in (alive, served.dead_url):
        assert total(seen, "warmroute_replica_state", replica=replica) == 1, "in one state at a time"
    assert total(seen, "warmroute_sessions") == 1
    assert total(seen, "warmroute_body_bytes") == total(seen, "warmroute_log_lines_dropped_total") == 0


async def test_gauges_follow_what_is_under_way(served: Served) -> None:
    served.replica.fault(hang=True)
    async with httpx.AsyncClient(base_url=served.router.url, trust_env=False, timeout=30, headers=JSON) as client:
        body = json.dumps(chat("word " * 2000)).encode()
        waiting = asyncio.create_task(client.post("/v1/chat/completions", content=body))
        seen = await until(
            served.samples,
            lambda seen: total(seen, "warmroute_in_flight_requests", replica=served.replica.url) == 1,
            10,
            "a request in flight",
        )
        assert total(seen, "warmroute_pending_prefill_tokens", replica=served.replica.url) == len(body) // 4
        assert total(seen, "warmroute_body_bytes") == len(body)
        assert total(seen, "warmroute_connections") == 1
        served.replica.fault(hang=False)
        assert (await waiting).status_code == 200
    seen = await served.counted(1)
    assert total(seen, "warmroute_in_flight_requests") == total(seen, "warmroute_body_bytes") == 0
    await until(served.samples, lambda seen: total(seen, "warmroute_connections") == 0, 10, "the client has gone")


async def test_names_and_labels_are_those_documented(served: Served) -> None:
    """Every family of ours stands in the table with its labels, and nothing stands there that is not exposed.

    Prefill is regretted when the engine's cache is lost after it was seen to be used.
    """
    async with httpx.AsyncClient(base_url=served.router.url, trust_env=False) as client:
        for _ in range(3):  # one at least is tried on the dead replica first
            assert (await client.post("/v1/chat/completions", json=chat("hello " * 500))).status_code == 200
        assert (await client.post("/flush_cache")).status_code == 403
        (await client.post(f"{served.replica.url}/flush_cache")).raise_for_status()
        assert (await client.post("/v1/chat/completions", json=chat("hello " * 500))).status_code == 200
    seen = await served.counted(5)
    exposed: dict[str, set[str]] = {}
    for (name, carried), _ in seen.items():
        if name.startswith("warmroute_"):
            labels = exposed.setdefault(re.sub(r"_(bucket|count|sum)$", "", name), set())
            labels |= {label for label, _ in carried if label != "le"}
    assert exposed == documented()


def documented() -> dict[str, set[str]]:
    """The metrics table of the operations page: names, short forms written out, with their labels."""
    text = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
    table = text.partition("## Metrics")[2].partition("## What failures")[0]
    found: dict[str, set[str]] = {}
    for names, labels in re.findall(r"^\| (`.*?) \| *(.*?) *\|", table, re.M):
        for name in re.findall(r"`(\w+)`", names):
            full = name if name.startswith("warmroute_") else f"warmroute{name}tokens_total"
            found[full] = set(filter(None, labels.split(", ")))
    return found


async def test_label_values_are_closed_sets_and_hold_nothing_of_the_client(served: Served) -> None:
    hostile = {"x-session-affinity": 'raw"key\\', "user-agent": "agent-of-mine", "x-request-id": "id-of-mine"}
    async with httpx.AsyncClient(base_url=served.router.url, trust_env=False, headers=hostile) as client:
        for path in ("/v1/models", "/no/such/path-of-mine", "/get_weights_by_name", "/v1/../../up"):
            await client.get(path)
        await client.request("BREW", "/v1/models")
    seen = await served.counted(5)
    urls = {served.replica.url, served.dead_url}
    reasons = set(re.findall(r"`(\w+)`", (ROOT / "docs/operations.md").read_text(encoding="utf-8")))
    for (name, carried), _ in seen.items():
        if not name.startswith("warmroute_"):
            continue
        for label, value in carried:
            if label == "replica":
                assert value in urls
            elif label == "reason":
                assert value in (reasons if name == "warmroute_refusals_total" else set(Reason))
            elif label != "le":
                assert value in CLOSED[label], (name, label, value)
    everything = " ".join(f"{name} {sorted(carried)}" for name, carried in seen)
    for raw in ("key", "of-mine", "BREW", "weights"):
        assert raw not in everything


# Without a router


def test_replica_labels_are_bounded_by_the_fleet() -> None:
    """Replicas that come and go under new names, as pods do, leave nothing behind."""
    balancer = Balancer(RoundRobin())
    metrics = Metrics(balancer)
    for i in range(300):
        replica = Replica(f"http://pod-{i}")
        balancer.join(replica, 0.0)
        metrics.routed(Choice(replica, Reason.ROTATION))
        if i >= 3:
            balancer.leave(f"http://pod-{i - 3}", 0.0)
    seen = parse(metrics.exposition().decode())
    labels = {value for _, carried in seen for label, value in carried if label == "replica"}
    assert labels >= {f"http://pod-{i}" for i in (297, 298, 299)}
    assert len(labels) <= 4


@pytest.mark.parametrize("name", ['a"b', "a\\b", "{x=1}", "a,b", "#", "~!@$%^&*()"])
def test_any_name_that_a_replica_may_have_can_be_exposed(name: str) -> None:
    balancer = Balancer(RoundRobin())
    balancer.join(Replica(name), 0.0)
    seen = parse(Metrics(balancer).exposition().decode())
    assert total(seen, "warmroute_replica_state", replica=name, state="ready") == 1


@given(st.lists(st.floats(min_value=0, max_value=2000), max_size=50))
def test_buckets_are_cumulative_and_hold_what_their_bound_says(values: list[float]) -> None:
    histogram = Histogram()
    for value in values:
        histogram.observe(value)
    buckets = histogram.buckets()
    assert [bound for bound, _ in buckets] == [*map(str, SECONDS), "+Inf"]
    for bound, count in buckets:
        assert count == sum(value <= float(bound) for value in values)
    assert histogram.total == pytest.approx(sum(values))
