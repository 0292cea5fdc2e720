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
from policies.round_robin import RoundRobin
from policies.types import OUTCOMES, Choice, Reason, Replica
from router.metrics import Metrics
from router.metrics.exposition import SLICE_SAMPLES, Exposition
from router.metrics.heartbeat import BEAT_S, MAX_S, Heartbeat
from router.metrics.histogram import SECONDS, Histogram
from router.metrics.labels import REFUSALS
from router.metrics.live import LIVE_S, LiveSessions
from router.metrics.table import FAMILIES, markdown
from sim.emulator import Emulator, EmulatorConfig
from tests.fakes.process import ROOT, Router, free_port, start_router
from tests.fakes.waiting import until
from tests.fakes.wire import LIMIT_S

OPERATIONS = (ROOT / "docs/operations.md").read_text(encoding="utf-8")

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]

JSON = {"content-type": "application/json"}

BY_NAME = {family.name: family for family in FAMILIES}


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
            self.samples,
            lambda seen: total(seen, "warmroute_requests_total") == requests,
            LIMIT_S,
            f"{requests} requests",
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
    async with httpx.AsyncClient(base_url=served.router.url, trust_env=False, timeout=60, headers=JSON) as client:
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
    await until(served.samples, lambda seen: total(seen, "warmroute_connections") == 0, LIMIT_S, "the client has gone")


async def test_what_is_exposed_is_what_the_table_says(served: Served) -> None:
    """Every family of ours stands in the table with its kind and labels, and nothing stands there that is not exposed.

    Prefill is regretted when the engine's cache is lost after it was seen to be used.
    """
    async with httpx.AsyncClient(base_url=served.router.url, trust_env=False) as client:
        for _ in range(3):  # one at least is tried on the dead replica first
            assert (await client.post("/v1/chat/completions", json=chat("hello " * 500))).status_code == 200
        assert (await client.post("/flush_cache")).status_code == 403
        (await client.post(f"{served.replica.url}/flush_cache")).raise_for_status()
        assert (await client.post("/v1/chat/completions", json=chat("hello " * 500))).status_code == 200
        await served.counted(5)
        reported = "warmroute_report_age_seconds"
        await until(served.samples, lambda seen: any(name == reported for name, _ in seen), LIMIT_S, "a load report")
        text = (await client.get(f"{served.router.admin_url}/metrics")).text
    told: dict[str, tuple[str, str, set[str]]] = {}
    for name, kind in re.findall(r"^# TYPE (warmroute_\w+) (\w+)$", text, re.M):
        (meaning,) = re.findall(rf"^# HELP {name} (.*)$", text, re.M)
        told[name] = (kind, meaning, set())
    for (name, carried), _ in parse(text).items():
        if name.startswith("warmroute_"):
            family = name if name in told else re.sub(r"_(bucket|count|sum)$", "", name)
            told[family][2].update({label for label, _ in carried if label != "le"})
    assert told == {
        family.name: (
            family.kind,
            family.help,
            # Of keys there is nothing to tell where none are asked for, nor of a store, a source or pools where there
            # are none.
            {
                each.name
                for each in family.labels
                if each.name not in ("key", "source") and "_store_" not in family.name and "_pool" not in family.name
            },
        )
        for family in FAMILIES
    }


def test_the_operations_page_has_the_table() -> None:
    """`python -m router.metrics` writes it."""
    section = OPERATIONS.split("\n## Metrics\n", 1)[1].split("\n## ", 1)[0]
    assert "\n".join(markdown()) in section
    assert section.count("| label |") == 1


def test_the_closed_set_of_refusals_is_that_of_the_operations_page() -> None:
    section = OPERATIONS.split("\n## Refusals\n", 1)[1].split("\n## ", 1)[0]
    assert set(REFUSALS) == set(re.findall(r"^\| `(\w+)` \|", section, re.M))


async def test_label_values_are_closed_sets_and_hold_nothing_of_the_client(served: Served) -> None:
    hostile = {"x-session-affinity": 'hush"hush\\', "user-agent": "agent-of-mine", "x-request-id": "id-of-mine"}
    async with httpx.AsyncClient(base_url=served.router.url, trust_env=False, headers=hostile) as client:
        for path in ("/v1/models", "/no/such/path-of-mine", "/get_weights_by_name", "/v1/../../up"):
            await client.get(path)
        await client.request("BREW", "/v1/models")
    seen = await served.counted(5)
    urls = (served.replica.url, served.dead_url)
    for (name, carried), _ in seen.items():
        if not name.startswith("warmroute_"):
            continue
        family = BY_NAME.get(name) or BY_NAME[re.sub(r"_(bucket|count|sum)$", "", name)]
        closed = {label.name: urls if label.name == "replica" else label.values for label in family.labels}
        for label, value in carried:
            if label != "le" and (values := closed[label]) is not None:
                assert value in values, (name, label, value)
    everything = " ".join(f"{name} {sorted(carried)}" for name, carried in seen)
    for raw in ("hush", "of-mine", "BREW", "weights"):
        assert raw not in everything


async def test_what_turns_cost_and_where_they_went(served: Served) -> None:
    """Two sessions of three turns each on the one replica that lives; their streams have gaps between chunks."""
    async with httpx.AsyncClient(base_url=served.router.url, trust_env=False, headers=JSON) as client:
        for turn in range(3):
            for session in ("a", "b"):
                body = chat(f"{session} " + "word " * 500 * (turn + 1)) | {"max_tokens": 20}
                headers = {"x-session-affinity": session}
                (await client.post("/v1/chat/completions", json=body, headers=headers)).raise_for_status()
    seen = await served.counted(6)
    assert total(seen, "warmroute_live_sessions") == 2
    assert total(seen, "warmroute_turns_total") == total(seen, "warmroute_first_token_ratio_count") == 6
    assert total(seen, "warmroute_turns_total", turn="new") == 2
    assert total(seen, "warmroute_turns_total", turn="stayed") == 4 - total(seen, "warmroute_turns_total", turn="lost")
    assert total(seen, "warmroute_chunk_gap_seconds_count") == 6
    observed = total(seen, "warmroute_observed_seconds_total")
    assert 0 < observed <= total(seen, "warmroute_first_byte_seconds_sum")
    assert total(seen, "warmroute_expected_seconds_total", term="prefill") > 0
    assert total(seen, "warmroute_wait_seconds_count") == 6
    assert total(seen, "warmroute_upstream_connections", replica=served.replica.url) >= 1
    assert 0 <= total(seen, "warmroute_report_age_seconds", replica=served.replica.url) < 5
    assert total(seen, "warmroute_report_age_seconds", replica=served.dead_url) == 0, "it has sent none"
    assert total(seen, "warmroute_loop_lag_seconds_count") > 0
    assert total(seen, "warmroute_config_in_force") == 1


async def test_the_mean_gap_is_of_the_chunks_that_were_sent(served: Served) -> None:
    """The time from the first chunk to the end, over the chunks behind the first."""
    async with httpx.AsyncClient(base_url=served.router.url, trust_env=False, headers=JSON) as client:
        body = chat("word " * 100) | {"max_tokens": 50}
        (await client.post("/v1/chat/completions", json=body)).raise_for_status()
        await client.get("/v1/models")
    seen = await served.counted(2)
    assert total(seen, "warmroute_chunk_gap_seconds_count") == 1, "an answer that comes whole has no gaps"
    mean = total(seen, "warmroute_chunk_gap_seconds_sum")
    stream = total(seen, "warmroute_request_seconds_sum") - total(seen, "warmroute_first_byte_seconds_sum")
    assert 0 < mean * 50 <= stream * 1.01 + 0.01, "50 tokens came in 51 chunks or more"


# Without a router


def page(metrics: Metrics) -> str:
    return b"".join(Exposition(metrics).slices()).decode()


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
    seen = parse(page(metrics))
    labels = {value for _, carried in seen for label, value in carried if label == "replica"}
    assert labels >= {f"http://pod-{i}" for i in (297, 298, 299)}
    assert len(labels) <= 4
    assert len(metrics.replicas) <= 5, "nor are they kept"


@pytest.mark.parametrize("name", ['a"b', "a\\b", "{x=1}", "a,b", "#", "~!@$%^&*()"])
def test_any_name_that_a_replica_may_have_can_be_exposed(name: str) -> None:
    balancer = Balancer(RoundRobin())
    balancer.join(Replica(name), 0.0)
    seen = parse(page(Metrics(balancer)))
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


@pytest.mark.parametrize("replicas", [SLICE_SAMPLES - 1, SLICE_SAMPLES, SLICE_SAMPLES + 1, 3 * SLICE_SAMPLES])
def test_a_page_made_in_slices_is_one_page(replicas: int) -> None:
    """Each family is announced once, each replica told once."""
    balancer = Balancer(RoundRobin())
    for i in range(replicas):
        balancer.join(Replica(f"r{i}"), 0.0)
    text = page(Metrics(balancer))
    announced = re.findall(r"^# TYPE (\S+)", text, re.M)
    assert len(announced) == len(set(announced))
    assert len(re.findall(r"^# HELP ", text, re.M)) == len(announced)
    seen = parse(text)
    assert sum(name == "warmroute_in_flight_requests" for name, _ in seen) == replicas
    assert total(seen, "warmroute_replica_state", state="ready") == replicas


async def test_the_loop_runs_between_slices_and_the_fleet_may_change_there() -> None:
    balancer = Balancer(RoundRobin())
    for i in range(2000):
        balancer.join(Replica(f"r{i}"), 0.0)
    turns = 0

    async def disturb() -> None:
        nonlocal turns
        while True:
            turns += 1
            balancer.leave(f"r{turns}", 0.0)
            balancer.join(Replica(f"new{turns}"), 0.0)
            await asyncio.sleep(0)

    other = asyncio.create_task(disturb())
    text = await Exposition(Metrics(balancer)).text()
    other.cancel()
    assert turns > 10
    assert total(parse(text.decode()), "warmroute_sessions_limit") > 0


def test_closed_counters_are_told_before_they_are_counted() -> None:
    """Else Prometheus could not see the first refusal as an increase."""
    seen = parse(page(Metrics(Balancer(RoundRobin()))))
    assert sum(name == "warmroute_requests_total" for name, _ in seen) == len(OUTCOMES)
    for name in ("warmroute_refusals_total", "warmroute_redispatches_total"):
        (labels,) = (family.labels for family in FAMILIES if family.name == name)
        assert sum(found == name for found, _ in seen) == len(labels[0].values or ())


def test_lateness_is_what_a_beat_was_late_and_its_maximum_fades() -> None:
    heartbeat = Heartbeat(lambda: 0.0)
    now = 1000.0
    heartbeat.beat(now)
    for late in (0.0, 0.3, 0.0):
        now += BEAT_S + late
        heartbeat.beat(now)
    assert heartbeat.lateness.total == pytest.approx(1000.0 + 0.3)
    for _ in range(int(MAX_S / BEAT_S)):
        now += BEAT_S
        heartbeat.beat(now)
    assert heartbeat.max_s >= 0.3
    for _ in range(int(2 * MAX_S / BEAT_S)):
        now += BEAT_S
        heartbeat.beat(now)
    assert heartbeat.max_s < 0.001


def test_sessions_are_live_for_ten_minutes_and_bounded() -> None:
    live = LiveSessions(3)
    for i, key in enumerate((b"a", b"b", b"a")):
        live.ended(key, float(i))
    assert live.count(LIVE_S) == 2
    assert live.count(LIVE_S + 1.5) == 1, "b ended at 1, a again at 2"
    for i in range(10):
        live.ended(b"%d" % i, LIVE_S)
    assert live.count(LIVE_S) == 3


def test_a_refused_configuration_shows_until_one_is_applied() -> None:
    metrics = Metrics(Balancer(RoundRobin()))
    metrics.reloaded(applied=False)
    seen = parse(page(metrics))
    assert total(seen, "warmroute_config_reloads_total", result="refused") == 1
    assert total(seen, "warmroute_config_in_force") == 0
    metrics.reloaded(applied=True)
    assert total(parse(page(metrics)), "warmroute_config_in_force") == 1
