"""The router over real sockets, on the loop it runs on in production."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from router.identity import DEFAULT_RULES, IdentityRules
from router.settings import PolicySettings, Settings
from tests.fakes.proxied import Proxied
from tests.fakes.upstream import Script, ScriptedUpstream

SWEEP_S = 0.05


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """All of these tests run on uvloop."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(scope="session", autouse=True)
def _frozen() -> Iterator[None]:
    """What exists before the first test need not be searched, after each, for requests left open."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


Warm = Callable[..., Awaitable[Proxied]]


@pytest.fixture
async def warm(tmp_path: Path) -> AsyncIterator[Warm]:
    """Starts the router in front of replicas, each given as a script or as a URL. What must always hold is checked
    when the test is over: no lease, body or request left open, no error in a callback, one log line per request."""
    routers: list[Proxied] = []
    upstreams: list[ScriptedUpstream] = []

    async def start(
        *replicas: Script | ScriptedUpstream | str,
        policy: str = "round_robin",
        sweep_s: float = SWEEP_S,
        **sections: Any,
    ) -> Proxied:
        log = tmp_path / f"access-{len(routers)}.log"
        settings = Settings(response_headers=True, policy=PolicySettings(name=policy), **sections)
        proxied = Proxied(settings, IdentityRules(DEFAULT_RULES, b""), log, sweep_s=sweep_s)
        urls: list[str] = []
        for replica in replicas:
            if isinstance(replica, str):
                urls.append(replica)
                continue
            upstream = replica if isinstance(replica, ScriptedUpstream) else await ScriptedUpstream(replica).start()
            upstreams.append(upstream)
            proxied.upstreams.append(upstream)
            urls.append(upstream.url)
        routers.append(proxied)
        await proxied.start(urls)
        return proxied

    yield start
    faults: list[BaseException] = []
    for stop in [each.stop for each in routers] + [each.stop for each in upstreams]:
        try:
            await stop()
        except (Exception, AssertionError) as fault:
            faults.append(fault)
    if faults:
        raise faults[0]


@pytest.fixture
def unaccepting() -> Iterator[str]:
    """URL of a socket whose queue of connections is full, so that the kernel drops further attempts."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(0)
    address = listener.getsockname()
    fillers = [socket.socket() for _ in range(4)]
    for filler in fillers:
        filler.setblocking(False)
        filler.connect_ex(address)
    yield f"http://127.0.0.1:{address[1]}"
    for each in (*fillers, listener):
        each.close()
