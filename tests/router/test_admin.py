"""The admin port of a running router."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from policies.registry import parameters
from policies.residency import DEFAULT_TOKENS, HEADROOM
from tests.fakes.process import Router, free_port, start_router
from tests.fakes.replica import FakeReplica, Reply
from tests.fakes.waiting import until
from tests.fakes.wire import LIMIT_S

LOADS = {"timestamp": "2026-11-29T12:00:05+00:00", "loads": [{"timestamp": 1795953602.0, "num_running_reqs": 3}]}
"""Taken three seconds before the answer."""


@dataclass
class Served:
    router: Router
    replica: FakeReplica
    dead_url: str
    admin: httpx.AsyncClient
    log: Path

    async def chat(self, session: str) -> httpx.Response:
        async with httpx.AsyncClient(base_url=self.router.url, trust_env=False) as client:
            body = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
            return await client.post("/v1/chat/completions", json=body, headers={"x-session-affinity": session})


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    """A router in front of a replica and of a port where none is."""
    replica = FakeReplica(ready=200, health=200)
    replica.say("/v1/loads", LOADS)
    replica.say("/v1/chat/completions", {"choices": []})
    await replica.start()
    dead_url = f"http://127.0.0.1:{free_port()}"
    log = tmp_path / "router.log"
    router = await asyncio.to_thread(start_router, [replica.url, dead_url], log)
    async with httpx.AsyncClient(base_url=router.admin_url, trust_env=False) as admin:
        yield Served(router, replica, dead_url, admin, log)
    await asyncio.to_thread(router.stop)
    await replica.stop()


async def test_replicas(served: Served) -> None:
    async def replicas() -> dict[str, dict[str, object]]:
        found = (await served.admin.get("/replicas")).raise_for_status().json()["replicas"]
        return {replica["id"]: replica for replica in found}

    seen = await until(
        replicas,
        lambda seen: seen[served.dead_url]["state"] == "ejected" and seen[served.replica.url]["others_in_flight"] == 3,
        LIMIT_S,
        "the dead one is ejected, the other has reported three requests twice",
    )
    good, dead = seen[served.replica.url], seen[served.dead_url]
    assert (good["url"], good["state"], good["why"], good["weight"]) == (served.replica.url, "ready", "ready", 1.0)
    assert (good["in_flight"], good["served"], good["pending_prefill_tokens"]) == (0, 0, 0)
    load = good["load"]
    assert isinstance(load, dict)
    assert (load["running"], load["waiting"]) == (3, None)
    assert 3 <= load["age_s"] < 1_000
    assert (good["expected_wait_s"], good["resident_tokens"], good["live_tokens"]) == (0, 0, 0)
    assert good["capacity_tokens"] == DEFAULT_TOKENS * HEADROOM, "it does not tell"
    speed = good["speed"]
    assert isinstance(speed, dict)
    assert (speed["prefill_factor"], speed["step_ms"], speed["stall"]) == (1, 4.6, 1)
    assert speed["observations"] == {"prefills": 0, "decodes": 0, "answers": 0}
    assert str(dead["why"]).startswith("/ready: ")
    assert dead["load"] is None
    for replica in seen.values():
        assert datetime.fromisoformat(str(replica["since"])).tzinfo is not None


async def test_sessions_by_value_and_by_digest_and_no_raw_value_in_the_log(served: Served) -> None:
    unknown = await served.admin.get("/sessions/my/secret session")
    assert unknown.status_code == 404
    assert unknown.json()["error"]["code"] == "unknown_session"
    assert (await served.chat("my/secret session")).status_code == 200
    known = await served.admin.get("/sessions/my/secret session")
    assert known.status_code == 200
    (home,) = known.json()["homes"]
    assert home["replica"] == served.replica.url
    assert home["idle_s"] >= 0
    digest = known.json()["session"]
    assert len(digest) == 32
    assert (await served.admin.get(f"/sessions/{digest}")).json()["homes"][0]["replica"] == served.replica.url
    assert (await served.admin.get(f"/sessions/{'0' * 32}")).status_code == 404
    await asyncio.to_thread(served.router.stop)
    log = served.log.read_text()
    assert digest[:16] in log
    assert "secret session" not in log


async def test_policy(served: Served) -> None:
    said = (await served.admin.get("/policy")).json()
    assert said["policy"] == "session_affinity"
    assert said["parameters"] == parameters("session_affinity")
    assert said["needs"] == ["session", "fingerprint", "blocks"]
    assert said["shadow"] is None


async def test_metrics_can_be_scraped(served: Served) -> None:
    assert (await served.chat("s")).status_code == 200
    answer = await served.admin.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    samples = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }
    assert samples["warmroute_requests_total", "body", "done"] == 1
    assert samples["warmroute_replica_state", served.replica.url, "ready"] == 1
    assert samples["warmroute_sessions",] == 1


async def test_readiness_follows_the_replicas(served: Served) -> None:
    assert (await served.admin.get("/readyz")).json() == {"status": "ready"}
    served.replica.say("/ready", Reply(503))

    async def readyz() -> httpx.Response:
        return await served.admin.get("/readyz")

    answer = await until(readyz, lambda answer: answer.status_code == 503, LIMIT_S, "not ready")
    assert answer.json() == {"status": "not ready", "reason": "no replica is ready"}
    assert (await served.admin.get("/livez")).status_code == 200, "a restart would help nobody"
    refused = await served.chat("s")
    assert (refused.status_code, refused.headers["x-warmroute-reason"]) == (503, "all_ejected")


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/metrics", "/replicas", "/policy"])
async def test_head_works_and_other_methods_do_not(path: str, served: Served) -> None:
    head = await served.admin.head(path)
    assert (head.status_code, head.content) == (200, b"")
    assert int(head.headers["content-length"]) > 0
    for method in ("POST", "PUT", "DELETE"):
        if (method, path) == ("PUT", "/policy"):
            continue
        answer = await served.admin.request(method, path)
        assert answer.status_code == 405
        allowed = {"GET", "HEAD", "PUT"} if path == "/policy" else {"GET", "HEAD"}
        assert {each.strip() for each in answer.headers["allow"].split(",")} == allowed
        assert "Method Not Allowed" in answer.json()["error"]["message"]


async def test_an_unknown_path_says_what_there_is(served: Served) -> None:
    answer = await served.admin.get("/nosuch")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "not_found"
    assert "/sessions/{key}" in answer.json()["error"]["message"]
