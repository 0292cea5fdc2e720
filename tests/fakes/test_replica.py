"""The fake replica does what tests believe it does."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from tests.fakes.replica import SILENCE, FakeReplica, Reply
from tests.fakes.wire import LIMIT_S, eventually


async def test_it_answers_by_path_and_remembers() -> None:
    replica = await FakeReplica(ready=503, v1={"a": 1}).start()
    async with httpx.AsyncClient(base_url=replica.url, trust_env=False) as client:
        assert (await client.get("/ready")).status_code == 503
        assert (await client.get("/v1")).json() == {"a": 1}
        assert (await client.get("/other")).status_code == 404
        replica.say("/ready", Reply(200, b"yes", ["X-A: b"]))
        answer = await client.get("/ready")
    assert (answer.status_code, answer.content, answer.headers["x-a"]) == (200, b"yes", "b")
    assert replica.asked == ["/ready", "/v1", "/other", "/ready"]
    await replica.stop()


async def test_it_can_be_silent() -> None:
    replica = await FakeReplica(health=SILENCE).start()
    async with httpx.AsyncClient(base_url=replica.url, trust_env=False) as client:
        with pytest.raises(httpx.ReadTimeout):
            await client.get("/health", timeout=httpx.Timeout(LIMIT_S, read=0.05))
    await eventually(lambda: replica.asked == ["/health"])
    await replica.stop()


async def test_it_goes_down_and_comes_back() -> None:
    replica = await FakeReplica(ready=200).start()
    async with httpx.AsyncClient(base_url=replica.url, trust_env=False) as client:
        await client.get("/ready")
        await replica.down()
        with pytest.raises(httpx.ConnectError):
            await client.get("/ready")
        await replica.up()
        assert (await client.get("/ready")).status_code == 200
    await replica.stop()


async def test_waiting_for_a_question_ends_with_it() -> None:
    replica = await FakeReplica(ready=200).start()
    async with httpx.AsyncClient(base_url=replica.url, trust_env=False) as client:
        waiting = asyncio.create_task(replica.asked_for("/ready", 2))
        await client.get("/ready")
        await client.get("/other")
        assert not waiting.done()
        await client.get("/ready")
        await waiting
    await replica.stop()
