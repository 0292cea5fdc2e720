"""Two real engines for the whole run, made whole and idle before each test, and a router of each test's own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import httpx
import pytest

from tests.engine.engine import LOGS, Engine, serving
from tests.fakes.process import Router, start_router


@pytest.fixture(scope="session")
def servers() -> Iterator[tuple[Engine, Engine]]:
    """Two engines, started at the same time; some may have been ended by a test since."""
    pair = (Engine("engine-0"), Engine("engine-1"))
    with serving(*pair):
        yield pair


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    """For requests of which only the meaning counts. As many connections as are asked for."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(trust_env=False, timeout=60, limits=limits) as client:
        yield client


@pytest.fixture
async def engines(servers: tuple[Engine, Engine], client: httpx.AsyncClient) -> tuple[Engine, Engine]:
    """Both engines, ready and idle; those that a test has ended are started again."""
    ended = [engine for engine in servers if not await engine.ready(client)]
    for engine in ended:
        engine.restart()
    for engine in ended:
        engine.wait_ready()
    for engine in servers:
        await engine.settle(client)
    return servers


@pytest.fixture
def router(engines: tuple[Engine, Engine], request: pytest.FixtureRequest) -> Iterator[Router]:
    """A router in front of both, which knows no session yet."""
    urls = [engine.url for engine in engines]
    log = LOGS / f"router-{request.node.name}.log"
    with start_router(urls, log, "--policy", "session_affinity") as router:
        yield router
