"""Switching policies, running a shadow and asking for explanations: over the admin port of a running router."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from policies.registry import parameters
from tests.fakes.client import RawClient, post
from tests.fakes.gated import PROMPT_TOKENS, Gated
from tests.fakes.process import Router, start_router
from tests.fakes.waiting import until
from tests.fakes.wire import LIMIT_S, eventually


@dataclass
class Served:
    router: Router
    replicas: dict[str, Gated]
    """By URL, which is their id."""
    admin: httpx.AsyncClient
    clients: list[RawClient] = field(default_factory=list)

    async def client(self) -> RawClient:
        client = await RawClient.connect(self.router.port)
        self.clients.append(client)
        return client

    async def chat(self, session: str, text: str = "hello") -> httpx.Headers:
        """One whole turn; the answer's headers."""
        body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": text}]}
        async with httpx.AsyncClient(base_url=self.router.url, trust_env=False, timeout=60) as client:
            answer = await client.post("/v1/chat/completions", json=body, headers={"x-session-affinity": session})
        assert answer.text.rstrip().endswith("data: [DONE]")
        return answer.headers

    async def home(self, session: str) -> str:
        """The home of a session once its last turn has been counted."""

        async def asked() -> dict[str, Any]:
            return dict((await self.admin.get(f"/sessions/{session}")).json())

        seen = await until(
            asked, lambda seen: bool(seen.get("homes")) and not seen["homes"][0]["in_flight"], LIMIT_S, "a home, idle"
        )
        return str(seen["homes"][0]["replica"])

    async def policy(self) -> dict[str, Any]:
        return dict((await self.admin.get("/policy")).raise_for_status().json())

    async def explain(self, query: str, **headers: str) -> dict[str, Any]:
        return dict((await self.admin.get(f"/explain?{query}", headers=headers)).raise_for_status().json())

    async def total(self, name: str, **labels: str) -> float:
        """The sum over all samples of that name that carry these labels."""
        text = (await self.admin.get("/metrics")).raise_for_status().text
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        return sum(s.value for s in samples if s.name == name and labels.items() <= s.labels.items())


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    """A router that tells its choices, in front of three replicas."""
    replicas = [Gated() for _ in range(3)]
    for replica in replicas:
        await replica.upstream.start()
    config = tmp_path / "c.yaml"
    config.write_text("response_headers: true\n")
    by_url = {replica.upstream.url: replica for replica in replicas}
    router = await asyncio.to_thread(start_router, list(by_url), tmp_path / "router.log", "--config", str(config))
    async with httpx.AsyncClient(base_url=router.admin_url, trust_env=False) as admin:
        served = Served(router, by_url, admin)
        yield served
        for client in served.clients:
            client.transport.abort()
        await eventually(lambda: all(client.ended for client in served.clients))
    await asyncio.to_thread(router.stop)
    for replica in replicas:
        await replica.upstream.stop()


# Switching


async def test_a_switch_keeps_streams_homes_and_counters(served: Served) -> None:
    await served.chat("settled")
    home = await served.home("settled")
    for replica in served.replicas.values():
        replica.finish.clear()
    streaming = await served.client()
    streaming.send(post("/v1/chat/completions", b"{}", "x-session-affinity: streaming"))
    head = await streaming.head()
    assert (head.status, head.header("x-warmroute-reason")) == (200, "new")
    assert await streaming.chunk() == b'data: {"id":"1"}\n\n'
    told = await served.admin.put("/policy", json={"name": "random", "parameters": {"seed": 7}})
    assert told.status_code == 200
    assert told.json() == {
        "old": {"name": "session_affinity", "parameters": parameters("session_affinity")},
        "new": {"name": "random", "parameters": {"seed": 7}},
    }
    assert await served.total("warmroute_policy_info", role="live", policy="random") == 1
    for replica in served.replicas.values():
        replica.finish.set()
    chunks = []
    while part := await streaming.chunk():
        chunks.append(part)
    assert chunks[-1] == b"data: [DONE]\n\n"
    assert (await served.chat("elsewhere"))["x-warmroute-reason"] == "random"
    assert (await served.admin.put("/policy", json={"name": "session_affinity"})).status_code == 200
    again = await served.chat("settled")
    assert (again["x-warmroute-replica"], again["x-warmroute-reason"]) == (home, "home")
    assert await served.home("streaming") == head.header("x-warmroute-replica"), "known though its end came later"
    assert await served.total("warmroute_choices_total") == 4, "counted through both switches"
    await until(lambda: served.total("warmroute_in_flight_requests"), lambda count: count == 0, LIMIT_S, "all ended")


async def test_a_switch_is_logged_once_with_old_new_and_who(served: Served) -> None:
    async with httpx.AsyncClient(base_url=served.router.admin_url, trust_env=False) as client:
        await client.put("/policy", json={"name": "sticky", "parameters": {"max_sessions": 5}})
    await served.admin.put("/policy", json={"name": "nosuch"})
    await asyncio.to_thread(served.router.stop)
    lines = [json.loads(line) for line in served.router.log.read_text().splitlines() if "switched" in line]
    (line,) = lines
    assert line["level"] == "info"
    old, new, who = line["message"].replace(", asked by ", " -> ").removeprefix("policy switched: ").split(" -> ")
    assert json.loads(old)["name"] == "session_affinity"
    assert json.loads(new) == {"name": "sticky", "parameters": {"session_expiration_s": 7200.0, "max_sessions": 5}}
    assert who.startswith("127.0.0.1:")


UNUSABLE = [
    ('{"name": "nosuch"}', 422, "unknown policy 'nosuch'; known policies: session_affinity, "),
    ('{"name": "random", "parameters": {"sed": 1}}', 422, "unknown parameter 'sed'; known parameters: seed"),
    ('{"name": "random", "parameters": {"seed": "x"}}', 422, "parameter 'seed' must be int, got 'x'"),
    ('{"name": "session_affinity", "parameters": {"beta": -1}}', 422, "beta must be a finite number, 0 or more"),
    ('{"name": "session_affinity", "parameters": {"beta": NaN}}', 422, "beta must be a finite number"),
    ('{"name": "session_affinity", "parameters": {"beta": 1%s}}' % ("0" * 400), 422, "'beta' must be float"),
    ('{"name": "consistent_hash", "parameters": {"virtual_nodes": 999999999999}}', 422, "virtual_nodes must be"),
    ('{"name": "random", "shadow": "sticky"}', 422, "unknown key 'shadow'; known keys: name, parameters"),
    ('{"name": "random", "parameters": []}', 422, "parameters must be an object"),
    ('{"name": 3}', 422, "name must be one of session_affinity, "),
    ("{}", 422, "name must be one of session_affinity, "),
    ('"random"', 422, "expected an object as {"),
    ("null", 422, "expected an object as {"),
    ("name=random", 400, "The body is not JSON"),
    ("", 400, "The body is not JSON"),
    ("[" * 60_000, 400, "The body is not JSON"),
    ('{"name": "' + "x" * 70_000 + '"}', 413, "longer than 65536 bytes"),
]
"""Bodies, the status that they are answered with, and what is said."""


@pytest.mark.parametrize("path", ["/policy", "/policy/shadow"])
async def test_what_cannot_be_changes_nothing_and_says_why(path: str, served: Served) -> None:
    before = await served.policy()
    for body, status, told in UNUSABLE:
        answer = await served.admin.put(path, content=body)
        assert answer.status_code == status, answer.text
        assert told in answer.json()["error"]["message"], body[:80]
        assert isinstance(answer.json()["error"]["code"], str)
        assert await served.policy() == before, body[:80]


# A shadow


async def test_a_shadow_is_asked_and_never_obeyed(served: Served) -> None:
    told = await served.admin.put("/policy/shadow", json={"name": "round_robin"})
    assert told.json() == {"old": None, "new": {"name": "round_robin", "parameters": {}}}
    served_by = {(await served.chat("s"))["x-warmroute-replica"] for _ in range(6)}
    assert served_by == {await served.home("s")}, "the policy in charge is obeyed"
    shadow = (await served.policy())["shadow"]
    assert (shadow["name"], shadow["choices"], shadow["same_replica"]) == ("round_robin", 6, 2), "each in turn"
    assert sum(pair["choices"] for pair in shadow["pairs"]) == 6
    assert {pair["shadow_reason"] for pair in shadow["pairs"]} == {"rotation"}
    counted = {"shadow_reason": "rotation", "same": "false"}
    assert await served.total("warmroute_shadow_choices_total", **counted) == 4
    assert await served.total("warmroute_shadow_choices_total", reason="home") == 5
    assert await served.total("warmroute_policy_info", role="shadow", policy="round_robin") == 1
    ended = await served.admin.delete("/policy/shadow")
    assert ended.json() == {"old": {"name": "round_robin", "parameters": {}}, "new": None}
    assert (await served.policy())["shadow"] is None
    await served.chat("s")
    assert await served.total("warmroute_shadow_choices_total") == 0


async def test_bodies_are_looked_into_as_far_as_the_shadow_needs(served: Served) -> None:
    await served.admin.put("/policy", json={"name": "round_robin"})
    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}

    async def session_of(request_id: str) -> object:
        async with httpx.AsyncClient(base_url=served.router.url, trust_env=False, timeout=60) as client:
            await client.post("/v1/chat/completions", json=body, headers={"x-request-id": request_id})
        return (await asyncio.to_thread(served.router.entry, request_id)).get("session")

    assert await session_of("alone") is None, "round robin asks for nothing"
    await served.admin.put("/policy/shadow", json={"name": "session_affinity"})
    assert await session_of("beside") is not None
    assert await session_of("again") is not None
    pairs = (await served.policy())["shadow"]["pairs"]
    assert {pair["shadow_reason"] for pair in pairs} == {"new", "home"}
    await served.admin.delete("/policy/shadow")
    assert await session_of("after") is None


async def test_a_shadow_survives_a_switch_of_the_policy_in_charge(served: Served) -> None:
    await served.admin.put("/policy/shadow", json={"name": "sticky"})
    await served.chat("s")
    await served.admin.put("/policy", json={"name": "least_loaded"})
    await served.chat("s")
    shadow = (await served.policy())["shadow"]
    assert (shadow["name"], shadow["choices"]) == ("sticky", 2)
    assert {pair["reason"] for pair in shadow["pairs"]} == {"new", "least_loaded"}


async def test_a_shadow_may_be_set_from_the_start(tmp_path: Path) -> None:
    with Router([], tmp_path / "log", "--policy", "random", "--shadow-policy", "sticky") as router:
        await asyncio.to_thread(router.wait_ok, f"{router.admin_url}/livez", 20)
        told = (await asyncio.to_thread(httpx.get, f"{router.admin_url}/policy", trust_env=False)).json()
    assert (told["policy"], told["shadow"]["name"], told["shadow"]["choices"]) == ("random", "sticky", 0)


# Explaining


async def test_an_unknown_session_is_new_and_asking_does_not_make_it_known(served: Served) -> None:
    first = await served.explain("session=s&prompt_tokens=20000")
    assert (first["policy"], first["reason"], first["prompt_tokens"]) == ("session_affinity", "new", 20_000)
    assert first["sentence"].startswith(f"goes to {first['replica']}: nothing is known of it; ")
    assert {each["replica"] for each in first["candidates"]} == set(served.replicas)
    assert await served.explain("session=s&prompt_tokens=20000") == first, "asking changes nothing"
    assert (await served.admin.get("/sessions/s")).status_code == 404
    assert await served.total("warmroute_choices_total") == await served.total("warmroute_sessions") == 0
    assert (await served.chat("s"))["x-warmroute-replica"] == first["replica"], "the same key, the same order"


async def test_a_known_session_stays_and_is_as_long_as_its_home_last_held(served: Served) -> None:
    await served.chat("s", "word " * 4000)
    home = await served.home("s")
    told = await served.explain("session=s")
    assert (told["replica"], told["reason"]) == (home, "home")
    assert told["prompt_tokens"] == pytest.approx(PROMPT_TOKENS + 20, abs=10)
    assert told["resident_tokens"] == told["prompt_tokens"]
    assert told["sentence"].startswith(f"stays on {home}: moving would cost ")
    assert " s of prefill" in told["sentence"]
    by_replica = {each["replica"]: each for each in told["candidates"]}
    assert list(by_replica[home]["terms"]) == [
        "queue",
        "room",
        "prefill",
        "neighbours",
        "arrivals",
        "crowding",
        "spread",
        "start",
    ]
    assert by_replica[home]["terms"]["prefill"] < min(
        each["terms"]["prefill"] for url, each in by_replica.items() if url != home
    )
    by_digest = await served.explain(f"session={told['session']}")
    assert (by_digest["replica"], by_digest["prompt_tokens"]) == (home, told["prompt_tokens"])
    longer = await served.explain("session=s&prompt_tokens=90000")
    assert longer["prompt_tokens"] == pytest.approx(90_000, abs=10), "as given, not as an estimate to be corrected"
    assert longer["prefill_s"] > told["prefill_s"]


async def test_a_request_is_explained_as_it_would_be_sent(served: Served) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "tell me a long story " * 500}]}
    async with httpx.AsyncClient(base_url=served.router.url, trust_env=False, timeout=60) as client:
        sent = await client.post("/v1/chat/completions", json=body)
    told = (await served.admin.post("/explain", json=body)).raise_for_status().json()
    assert (told["replica"], told["reason"]) == (sent.headers["x-warmroute-replica"], "home"), "known by its beginning"
    named = await served.explain("prompt_tokens=5", **{"x-session-affinity": "named"})
    assert (named["reason"], named["prompt_tokens"]) == ("new", 5)
    by_value = await served.explain("session=named&prompt_tokens=5")
    assert by_value["session"] == named["session"]
    nobody = (await served.admin.get("/explain")).json()
    assert (nobody["session"], nobody["reason"]) == (None, "no_session")


async def test_a_policy_that_weighs_nothing_is_explained_too(served: Served) -> None:
    await served.admin.put("/policy", json={"name": "rendezvous"})
    told = await served.explain("session=s")
    assert (told["policy"], told["reason"], told["candidates"]) == ("rendezvous", "hash", [])
    assert told["sentence"] == f"goes to {told['replica']}: by its key alone"


async def test_a_prompt_that_is_no_number_is_refused(served: Served) -> None:
    for given in ("x", "-1", "1.5", "", "1" * 13, "%C2%B2"):
        answer = await served.admin.get(f"/explain?session=s&prompt_tokens={given}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_query"), given
        assert "prompt_tokens must be a number from 0 to" in answer.json()["error"]["message"]


async def test_without_a_replica_the_refusal_is_that_of_a_request(tmp_path: Path) -> None:
    with Router([], tmp_path / "log") as router:
        await asyncio.to_thread(router.wait_ok, f"{router.admin_url}/livez", 20)
        async with httpx.AsyncClient(base_url=router.admin_url, trust_env=False) as admin:
            answer = await admin.get("/explain?session=s")
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_replicas")


# What is counted


async def test_regretted_prefill_is_counted_by_kind_and_reason(served: Served) -> None:
    """Round robin recomputes on the second replica what the first one holds."""
    await served.admin.put("/policy", json={"name": "round_robin"})
    for replica in served.replicas.values():
        replica.cached = 1000  # what is never nonzero may be what is not reported
    for _ in served.replicas:
        await served.chat("s", "word " * 30_000)
    elsewhere = await until(
        lambda: served.total("warmroute_regretted_prefill_tokens_total", kind="elsewhere", reason="rotation"),
        lambda tokens: tokens >= 2 * (PROMPT_TOKENS - 1000),
        LIMIT_S,
        "two of three turns were recomputed",
    )
    assert elsewhere == 2 * (PROMPT_TOKENS - 1000)
    assert await served.total("warmroute_regretted_prefill_tokens_total") == elsewhere


async def test_what_is_believed_of_replicas_and_their_spread_are_told(served: Served) -> None:
    await served.chat("s")
    home = await served.home("s")
    assert await served.total("warmroute_resident_tokens", replica=home) == PROMPT_TOKENS + 20
    assert await served.total("warmroute_resident_tokens") == PROMPT_TOKENS + 20
    assert await served.total("warmroute_resident_conversations", replica=home) == 1
    assert 0 < await served.total("warmroute_live_tokens", replica=home) <= PROMPT_TOKENS + 20
    for replica in served.replicas.values():
        replica.finish.clear()
    streaming = await served.client()
    streaming.send(post("/v1/chat/completions", b"{}", "x-session-affinity: s"))
    assert (await streaming.head()).header("x-warmroute-replica") == home
    dispersion = await until(lambda: served.total("warmroute_dispersion"), lambda value: value > 0, LIMIT_S, "a sample")
    assert dispersion == pytest.approx(2 / 3), "one of three runs one request: mean 1/3, variance 2/9"
    variance = await served.total("warmroute_spread_variance_seconds_total")
    assert 0 < variance < await served.total("warmroute_spread_mean_seconds_total")
    for replica in served.replicas.values():
        replica.finish.set()
    while await streaming.chunk():
        pass
    # The log tells what was expected.
    line = await asyncio.to_thread(
        served.router.wait_line, lambda line: '"reason":"home"' in line and '"cause":"done"' in line, LIMIT_S
    )
    entry = json.loads(line)
    assert entry["resident_tokens"] >= 0
    assert entry["prefill_s"] > 0
