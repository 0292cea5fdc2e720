"""The decision journal of a real router: all its choices come out the same when its calls are made again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import httpx
import pytest

from sim import journal, traces
from sim.emulator import Emulator, EmulatorConfig
from sim.replay import replay
from tests.fakes.process import Router

LIMIT_S = 60
SESSIONS = 16
TURNS = 6
TEXT = "a journal holds no word of this sentence " * 100


@pytest.fixture
async def replicas() -> AsyncIterator[list[Emulator]]:
    """A hundred times as fast as engines."""
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(Emulator(EmulatorConfig(time_scale=0.01, kv_tokens=60_000)))
            for _ in range(4)
        ]


async def serve(stack: AsyncExitStack, tmp_path: Path, urls: list[str], settings: str) -> Router:
    config = tmp_path / "config.yaml"
    config.write_text(settings)
    router = Router(urls, tmp_path / "log", "--config", str(config))
    stack.push_async_callback(asyncio.to_thread, router.stop)
    await asyncio.to_thread(router.wait_ok, f"{router.admin_url}/readyz", LIMIT_S)
    return router


async def converse(client: httpx.AsyncClient, session: int) -> None:
    """An agent's session: each turn sends all that was said; every third has a side call while it runs."""
    said = [{"role": "user", "content": f"session {session} {TEXT * (1 + session % 3)}"}]
    headers = {"x-session-affinity": f"secret session {session}"}
    for turn in range(TURNS):
        body = {"model": "m", "messages": said, "max_tokens": 16, "stream": turn % 2 == 0}
        asked = [client.post("/v1/chat/completions", json=body, headers=headers)]
        if turn % 3 == 1:
            title = {"model": "m", "messages": [{"role": "user", "content": f"title {session}"}], "max_tokens": 4}
            asked.append(client.post("/v1/chat/completions", json=title, headers=headers))
        if (session + turn) % 7 == 6:
            with suppress(TimeoutError):
                await asyncio.wait_for(client.post("/v1/chat/completions", json=body, headers=headers), 0.01)
        for answer in await asyncio.gather(*asked, return_exceptions=True):
            assert isinstance(answer, httpx.Response | httpx.HTTPError)
        said = [*said, {"role": "assistant", "content": "yes"}, {"role": "user", "content": f"turn {turn} {TEXT}"}]


async def traffic(router: Router, replicas: list[Emulator]) -> None:
    """Sessions over a fleet of which one replica dies and another drains, and a policy that is switched, explained and
    switched back."""
    async with (
        httpx.AsyncClient(base_url=router.url, trust_env=False, timeout=LIMIT_S) as client,
        httpx.AsyncClient(base_url=router.admin_url, trust_env=False, timeout=LIMIT_S) as admin,
    ):
        first = [asyncio.create_task(converse(client, session)) for session in range(SESSIONS // 2)]
        await asyncio.gather(*first)
        await replicas[0].kill()
        drain = f"/replicas/{replicas[1].url}/drain"
        (await admin.post(drain, json={"homes": "finish"})).raise_for_status()
        second = [asyncio.create_task(converse(client, session)) for session in range(SESSIONS)]
        (await admin.put("/policy", json={"name": "least_loaded"})).raise_for_status()
        await asyncio.gather(*second[::2])
        (await admin.get("/explain", params={"session": "secret session 1"})).raise_for_status()
        (await admin.put("/policy", json={"name": "session_affinity"})).raise_for_status()
        await asyncio.gather(*second[1::2])
        (await admin.delete(drain)).raise_for_status()
        await asyncio.gather(*(converse(client, session) for session in range(SESSIONS)))


async def test_every_choice_comes_out_the_same(tmp_path: Path, replicas: list[Emulator]) -> None:
    """Also where it is begun anew by size: all files that are left are one journal."""
    path = tmp_path / "journal.jsonl"
    async with AsyncExitStack() as stack:
        settings = f"journal: {{path: {path}, max_bytes: 65536, files: 100}}"
        router = await serve(stack, tmp_path, [replica.url for replica in replicas], settings)
        await traffic(router, replicas)
        async with httpx.AsyncClient(base_url=router.admin_url, trust_env=False) as admin:
            metrics = (await admin.get("/metrics")).text
        assert "warmroute_journal_lines_dropped_total 0.0" in metrics
    assert path.with_name("journal.jsonl.1").exists()
    found = replay(path)
    calls = [row.values["call"] for row in journal.calls(path)]
    assert found.choices == calls.count("acquire") - found.refusals > SESSIONS * TURNS * 2
    assert (found.different, found.differences) == (0, [])
    assert (found.whole, found.lost, found.skipped) == (True, 0, 0)
    assert {"join", "set_state", "report", "switch", "explain", "acquire", "first_token", "finish", "leave"} <= set(
        calls
    )
    first_tries = [row for row in journal.calls(path) if row.values["call"] == "acquire" and "failed" not in row.values]
    assert traces.load(path).requests == len(first_tries), "what was sent twice was asked once"
    written = json.dumps([dict(row.values) for row in journal.calls(path)])
    assert "secret session" not in written
    assert "sentence" not in written
    assert any("failed" in row.values for row in journal.calls(path)), "the dead replica failed somebody"
