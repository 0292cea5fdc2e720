"""Responses are found through whichever router they are asked for."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.fakes.client import Answer, RawClient, get, post
from tests.fakes.process import Router
from tests.fakes.waiting import until
from tests.fakes.wire import LIMIT_S
from tests.sharing.several import Several, emulators, made_for

RESPONSES = "/v1/responses"


@pytest.fixture(scope="module")
def keeping(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    with emulators(tmp_path_factory.mktemp("emulators") / "log", "--enable-response-store") as urls:
        yield urls


@pytest.fixture
async def several(tmp_path: Path, keeping: list[str]) -> AsyncIterator[Several]:
    async with made_for(tmp_path, keeping) as several:
        yield several


async def ask(router: Router, request: bytes) -> Answer:
    client = await RawClient.connect(router.port)
    try:
        client.send(request)
        return await client.answer()
    finally:
        client.transport.abort()


def turn(**fields: str) -> bytes:
    return post(RESPONSES, json.dumps({"input": "hello", "max_output_tokens": 4, **fields}).encode())


async def test_through_a_router_that_did_not_pass_the_answer(several: Several) -> None:
    several.server.start()
    one, other = await several.start(2)
    issuers: dict[str, str | None] = {}
    for number in range(8):
        answer = await ask(one, turn(instructions=f"you are number {number}"))
        issuers[json.loads(answer.body)["id"]] = answer.header("x-warmroute-replica")
    assert len(set(issuers.values())) > 1

    async def keys() -> list[str]:
        prefix = f"warmroute:*:s:{b'response:'.hex()}*"
        return [str(key) for key in await asyncio.to_thread(several.server.ask, "KEYS", prefix)]

    stored = await until(keys, lambda found: len(found) == len(issuers), LIMIT_S, "all are stored")
    assert not any(name.encode().hex() in key or name in key for name in issuers for key in stored)
    (late,) = await several.start()
    for router in (other, late, one):
        for name, issuer in issuers.items():
            for request in (turn(previous_response_id=name), get(f"{RESPONSES}/{name}")):
                answer = await ask(router, request)
                assert (answer.status, answer.header("x-warmroute-replica")) == (200, issuer)
    # What nobody knows leaves nothing in the store.
    known = 4 * len(issuers)  # those, and what went on from each through every router
    await until(keys, lambda found: len(found) == known, LIMIT_S, "all are stored")
    for router in (one, other, late):
        assert (await ask(router, get(f"{RESPONSES}/resp_unknown"))).status == 404
    await until(keys, lambda found: len(found) == known, LIMIT_S, "what was asked for is taken back")
