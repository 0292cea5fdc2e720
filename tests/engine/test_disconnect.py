"""A client that leaves frees its engine, long before the answer would have ended."""

from __future__ import annotations

import httpx
import pytest

from tests.engine.asks import chat, user
from tests.engine.engine import IDLE, Engine, Load
from tests.engine.seen import entry
from tests.engine.wire import Exchange
from tests.fakes.process import Router
from tests.fakes.waiting import until

pytestmark = pytest.mark.engine

LONG_TOKENS = 7_500
"""Half a minute and more on 2 cores: 4 to 6 ms a token at best."""
LIMIT_S = 60
"""Of a stream the engine learns at once; of a request it has not begun to answer only when it looks, every 4 s. The
engine's own count of aborted requests tells that the answer has not just come to its end."""


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "not-stream"])
async def test_a_client_that_leaves_frees_the_engine(
    stream: bool, router: Router, engines: tuple[Engine, Engine], client: httpx.AsyncClient
) -> None:
    aborted = sum([await engine.aborted(client) for engine in engines])
    body = chat([user("Go on for as long as you can.")], LONG_TOKENS, stream=stream)
    exchange = await Exchange.begin(router.port, "/v1/chat/completions", body, {"x-request-id": "leaver"})

    async def loads() -> set[Load]:
        return {await engine.load(client) for engine in engines}

    if stream:
        await exchange.first_data()
    await until(loads, lambda seen: seen == {IDLE, Load(1, 0)}, LIMIT_S, "one engine runs the request")
    await exchange.leave()
    await until(loads, lambda seen: seen == {IDLE}, LIMIT_S, "both engines are idle")

    line = await entry(router, "leaver")
    assert line.cause == "client"

    async def total() -> int:
        return sum([await engine.aborted(client) for engine in engines])

    await until(total, lambda seen: seen == aborted + 1, LIMIT_S, "the engine counts it as aborted")
