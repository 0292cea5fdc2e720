"""A router as a process of its own, under attack, while an ordinary client goes on asking."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop
import yaml

from tests.fakes.process import start_router
from tests.fakes.upstream import Script, ScriptedUpstream
from tests.hardening.attacked import Attacked


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """All of these tests run on uvloop."""
    return {"uvloop": uvloop.new_event_loop}


Attack = Callable[..., Awaitable[Attacked]]


@pytest.fixture
async def attacked(tmp_path: Path) -> AsyncIterator[Attack]:
    """Starts a router before one replica that runs `script` for its clients' requests and answers probes properly.

    Its timeouts are those of production, which no machine is too slow for: what waits for one makes that one short.

    In the end the ordinary client must have been answered throughout, nothing may be left open, and the router's own
    log may tell of no error.
    """
    started: list[Attacked] = []
    upstreams: list[ScriptedUpstream] = []

    async def start(script: Script, **sections: Any) -> Attacked:
        upstream = await ScriptedUpstream(script).start()
        upstreams.append(upstream)
        # Nothing but what a test sends: a replica that answers clients with nonsense need not do so to probes.
        sections.setdefault("health", {"interval_s": 60, "passive_fail_after": 1_000_000})
        config = tmp_path / f"config-{len(started)}.yaml"
        config.write_text(yaml.safe_dump(sections))
        log = tmp_path / f"router-{len(started)}.log"
        router = await asyncio.to_thread(start_router, [upstream.url], log, "--config", str(config))
        attacked = Attacked(router, upstream)
        started.append(attacked)
        await attacked.begin()
        return attacked

    yield start
    faults: list[BaseException] = []
    for each in started:
        try:
            await each.end()
        except (Exception, AssertionError) as fault:
            faults.append(fault)
        await asyncio.to_thread(each.router.stop)
    for upstream in upstreams:
        await upstream.stop()
    if faults:
        raise faults[0]
