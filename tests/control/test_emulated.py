"""Probes and reports against the emulated engine, whose answers are held against a real one's in tests/emulator."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import httpx
import pytest

from policies.balancer import Balancer
from policies.events import CacheCleared, LoadReported
from policies.types import Replica, State
from router.ask import Asker
from router.health import Health
from router.proxy.upstream import Upstream
from router.reports import Reports
from router.settings import HealthSettings, ReportSettings
from sim.emulator import Emulator, EmulatorConfig
from tests.fakes.recorder import Recorder
from tests.fakes.upstream import Peer, ScriptedUpstream
from tests.fakes.wire import eventually

PROBES = HealthSettings(timeout_s=1, deep_timeout_s=5, panic_share=0).model_copy(
    update={"interval_s": 0.02, "deep_interval_s": 0.05}
)
POLLS = ReportSettings(timeout_s=1).model_copy(update={"interval_s": 0.02})


@dataclass
class Watched:
    """A replica under probes and polls; seconds are real ones."""

    replica: Replica
    balancer: Balancer
    policy: Recorder
    health: Health
    reports: Reports

    async def becomes(self, state: State) -> None:
        await eventually(lambda: self.replica.state is state, f"{state}; {self.health.why(self.replica)}")

    async def reported(self, more: int = 2) -> None:
        goal = len(self.policy.told(LoadReported)) + more
        await eventually(lambda: len(self.policy.told(LoadReported)) >= goal, f"{goal} reports")


def watch(url: str) -> Watched:
    clock = asyncio.get_running_loop().time
    policy = Recorder()
    balancer = Balancer(policy)
    replica = Replica(url)
    balancer.join(replica, clock())
    watched = Watched(replica, balancer, policy, Health(balancer, PROBES, clock), Reports(balancer, POLLS, clock))
    asker = Asker(Upstream(url, connect_s=2, idle_s=3))
    watched.health.watch(replica, asker)
    watched.reports.watch(replica, asker)
    return watched


async def forget(watched: Watched) -> None:
    await watched.health.forget(watched.replica)
    await watched.reports.forget(watched.replica)


@pytest.fixture
async def emulator() -> AsyncIterator[Emulator]:
    """Fifty times as fast as an engine: its `/health` fails after 0.4 s instead of 20."""
    async with Emulator(EmulatorConfig(time_scale=0.02, kv_tokens=64_000)) as emulator:
        yield emulator


@pytest.fixture
async def watched(emulator: Emulator) -> AsyncIterator[Watched]:
    watched = watch(emulator.url)
    yield watched
    await forget(watched)


async def test_a_healthy_engine_is_ready_and_reports(emulator: Emulator, watched: Watched) -> None:
    await watched.reported()
    load = watched.replica.load
    assert load is not None
    assert (load.running, load.waiting, load.waiting_tokens, load.used_tokens) == (0, 0, 0, 0)
    assert load.capacity_tokens == 64_000
    await eventually(lambda: watched.health.probed)
    assert (watched.replica.state, watched.health.why(watched.replica)) == (State.READY, "ready")


async def test_an_engine_that_starts_or_drains_gets_nothing_new_until_it_says_so(
    emulator: Emulator, watched: Watched
) -> None:
    await eventually(lambda: watched.health.probed)
    emulator.fault(ready=False)
    await watched.becomes(State.DRAINING)
    emulator.fault(ready=True)
    await watched.becomes(State.READY)


async def test_a_queue_in_the_engine_shows_in_its_load(emulator: Emulator, watched: Watched) -> None:
    """Each answer takes more than half of the KV pool, so that the second has to wait."""
    said = [{"role": "user", "content": "hello"}]
    body = {"model": "m", "max_tokens": 40_000, "ignore_eos": True, "messages": said}
    async with httpx.AsyncClient(base_url=emulator.url, trust_env=False, timeout=60) as client:
        asked = [asyncio.create_task(client.post("/v1/chat/completions", json=body)) for _ in range(2)]
        await eventually(
            lambda: (load := watched.replica.load) is not None and (load.running, load.waiting) == (1, 1),
            "one runs and one waits",
        )
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)


async def test_a_hung_scheduler_is_found_out_and_its_old_numbers_stay_old() -> None:
    """At this speed its `/health` takes 1.2 s to fail: what fails within the second is a statement, not silence."""
    async with Emulator(EmulatorConfig(time_scale=0.06)) as emulator:
        watched = watch(emulator.url)
        try:
            await watched.reported()
            emulator.fault(hang=True)
            await watched.becomes(State.EJECTED)
            assert watched.health.why(watched.replica).endswith("it generates nothing")
            await watched.reported()
            assert watched.replica.load is not None
            found_out = asyncio.get_running_loop().time()
            await watched.reported(5)
            assert watched.replica.load.at < found_out, "answered anew, taken once"
            emulator.fault(hang=False)
            await watched.becomes(State.READY)
            await watched.reported()
            assert watched.replica.load.at > found_out
        finally:
            await forget(watched)


async def test_an_engine_that_is_killed_and_started_anew_is_known_to_be_cold(
    emulator: Emulator, watched: Watched
) -> None:
    async with httpx.AsyncClient(base_url=emulator.url, trust_env=False) as client:
        body = {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": "word " * 4000}]}
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    await watched.reported()
    port = emulator.port
    await emulator.kill()
    await watched.becomes(State.EJECTED)
    assert watched.policy.told(CacheCleared) == []
    async with Emulator(EmulatorConfig(time_scale=0.02, kv_tokens=64_000, port=port)):
        await watched.becomes(State.READY)
        await eventually(lambda: watched.policy.told(CacheCleared))
        await watched.reported(5)
        assert len(watched.policy.told(CacheCleared)) == 1


# Answers that are none


GARBAGE = [
    b"",
    b"\x00\xff\xfe\x80" * 50,
    b"SSH-2.0-OpenSSH_9.6\r\n",
    b"HTTP/1.1 200\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 7\r\n\r\nhello",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nshort",
    b"HTTP/1.1 200 OK\r\n" + b"x: " + b"a" * 100_000,
    b"HTTP/1.1 103 Early Hints\r\n\r\n",
]


@pytest.mark.parametrize("garbage", GARBAGE, ids=range(len(GARBAGE)))
async def test_a_server_that_talks_nonsense_is_ejected(garbage: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        peer.send(garbage)

    server = await ScriptedUpstream(script).start()
    watched = watch(server.url)
    try:
        await watched.becomes(State.EJECTED)
        assert watched.replica.load is None
        assert "in a way it should not" not in caplog.text
    finally:
        await forget(watched)
        await server.stop()


async def test_nothing_of_a_watch_is_left(emulator: Emulator) -> None:
    def ours() -> int:
        codes = (getattr(task.get_coro(), "cr_code", None) for task in asyncio.all_tasks())
        return sum(code is not None and "/router/" in code.co_filename for code in codes)

    assert ours() == 0
    watched = watch(emulator.url)
    assert ours() == 3, "two kinds of probes and the polling"
    await watched.reported()
    await forget(watched)
    assert ours() == 0
