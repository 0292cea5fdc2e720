"""Data-parallel ranks of a real engine, each of them a replica with a cache of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import yaml

from tests.engine.conversation import assert_stayed, converse
from tests.engine.engine import CAPACITY_TOKENS, FILLER_TOKENS, LOGS, Engine, serving
from tests.engine.seen import ReplicaView, replicas
from tests.fakes.process import Router, start_router
from tests.fakes.waiting import until

pytestmark = pytest.mark.engine

RANKS = 2
SESSIONS = 16
"""All on one of two ranks by bad luck: 1 in 2**15."""
AT_ONCE = 4
"""No more than one rank's batch."""
REPORT_LIMIT_S = 60


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = Engine("engine-ranks", RANKS)
    with serving(engine):
        yield engine


@contextmanager
def routed(engine: Engine, folder: Path, ranks: int) -> Iterator[Router]:
    """A router that takes the engine to have so many ranks, and knows no session yet."""
    file = folder / "c.yaml"
    file.write_text(yaml.safe_dump({"replicas": [{"id": "e", "url": engine.url, "ranks": ranks}]}))
    with start_router([], LOGS / f"router-ranks-{ranks}.log", "--config", str(file)) as router:
        yield router


async def test_every_turn_finds_the_cache_of_its_sessions_rank(
    engine: Engine, client: httpx.AsyncClient, tmp_path: Path
) -> None:
    gate = asyncio.Semaphore(AT_ONCE)
    with routed(engine, tmp_path, RANKS) as router:
        sessions = await asyncio.gather(*(converse(router, client, f"ranks-{n}", gate) for n in range(SESSIONS)))
    for turns in sessions:
        assert_stayed(turns)
    assert {turns[0].entry.replica for turns in sessions} == {"e@0", "e@1"}


async def test_affinity_to_the_whole_engine_finds_another_cache_and_the_log_says_so(
    engine: Engine, client: httpx.AsyncClient, tmp_path: Path
) -> None:
    """What ranks are for: it gives its ranks requests by turns."""
    with routed(engine, tmp_path, 1) as router:
        turns = await converse(router, client, "whole", asyncio.Semaphore(1))
        assert turns[0].entry.replica == turns[1].entry.replica == "e"
        assert turns[1].cached_tokens == 0

        async def log() -> str:
            return router.log.read_text()

        told = "its engine has 2 data-parallel ranks (--dp-size), and `ranks` says 1"
        await until(log, lambda log: told in log, REPORT_LIMIT_S, told)


async def test_each_rank_tells_its_own_load(engine: Engine, client: httpx.AsyncClient, tmp_path: Path) -> None:
    idle, busy = (ReplicaView("ready", running, 0, CAPACITY_TOKENS) for running in (0, 1))

    async def occupy() -> None:
        body = {"model": "tiny", "prompt": "filler", "max_tokens": FILLER_TOKENS, "ignore_eos": True}
        headers = {"x-data-parallel-rank": "1"}
        await client.post(f"{engine.url}/v1/completions", json=body, headers=headers)

    with routed(engine, tmp_path, RANKS) as router:

        async def views() -> dict[str, ReplicaView]:
            return await replicas(router, client)

        both_idle = {"e@0": idle, "e@1": idle}
        await until(views, lambda seen: seen == both_idle, REPORT_LIMIT_S, f"{both_idle}")
        occupied = asyncio.create_task(occupy())
        try:
            one_busy = {"e@0": idle, "e@1": busy}
            await until(views, lambda seen: seen == one_busy, REPORT_LIMIT_S, f"{one_busy}")
        finally:
            occupied.cancel()
            await asyncio.gather(occupied, return_exceptions=True)
        await until(views, lambda seen: seen == both_idle, REPORT_LIMIT_S, f"{both_idle} again")
