"""What the engines say of their load is what the router knows."""

from __future__ import annotations

import httpx
import pytest

from tests.engine.engine import CAPACITY_TOKENS, QUEUED, RUNNING, Engine
from tests.engine.seen import ReplicaView, replicas
from tests.fakes.process import Router
from tests.fakes.waiting import until

pytestmark = pytest.mark.engine

REPORT_LIMIT_S = 60
"""Reports are asked for about once a second; the limit is for a machine that is busy with other things."""


async def test_reports_of_idle_and_full_engines(
    router: Router, engines: tuple[Engine, Engine], client: httpx.AsyncClient
) -> None:
    first, second = engines
    idle = ReplicaView("ready", 0, 0, CAPACITY_TOKENS)
    full = ReplicaView("ready", RUNNING, QUEUED, CAPACITY_TOKENS)

    async def views() -> dict[str, ReplicaView]:
        return await replicas(router, client)

    both_idle = {first.url: idle, second.url: idle}
    await until(views, lambda seen: seen == both_idle, REPORT_LIMIT_S, f"{both_idle}")
    async with first.filled(client):
        one_full = {first.url: full, second.url: idle}
        await until(views, lambda seen: seen == one_full, REPORT_LIMIT_S, f"{one_full}")
    await until(views, lambda seen: seen == both_idle, REPORT_LIMIT_S, f"{both_idle} again")
