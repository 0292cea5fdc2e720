"""SGLang's response store: it is as its source is said to read, and who names a response reaches the one with it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from sim.emulator import Emulator, EmulatorConfig, stored
from sim.emulator.errors import ApiError
from sim.emulator.stored import ResponseStore
from tests.engine.engine import LOGS, Engine, serving
from tests.fakes.process import ROOT, start_router

pytestmark = pytest.mark.engine

RESPONSES = "/v1/responses"


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = Engine("engine-responses", 1, "--enable-response-store")
    with serving(engine):
        yield engine


def response_of(answer: httpx.Response) -> Any:
    """Of a whole answer, or of the first event of a stream."""
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return answer.json()
    return json.loads(answer.text.split("\n\n")[0].split("data: ")[1])["response"]


@pytest.mark.parametrize("stream", [False, True])
async def test_who_names_a_response_reaches_the_engine_that_has_it(
    engine: Engine, client: httpx.AsyncClient, *, stream: bool
) -> None:
    """By turns between it and an emulated one, which has other responses and says so of these with a 404."""
    async with Emulator(EmulatorConfig(response_store=True)) as other:
        log = LOGS / "router-responses.log"
        with start_router([engine.url, other.url], log, "--policy", "round_robin") as router:

            async def turn(**fields: Any) -> httpx.Response:
                body = {"model": "tiny", "input": "hello", "max_output_tokens": 4, "stream": stream, **fields}
                return await client.post(router.url + RESPONSES, json=body)

            first = [response_of(await turn())["id"] for _ in range(4)]
            for name in first:
                last = name
                for _ in range(2):
                    answer = await turn(previous_response_id=last)
                    assert answer.status_code == 200, answer.text
                    last = response_of(answer)["id"]
                assert (await client.get(f"{router.url}{RESPONSES}/{last}")).json()["id"] == last
                assert (await client.post(f"{router.url}{RESPONSES}/{last}/cancel")).json()["id"] == last
            there = [(await client.get(f"{engine.url}{RESPONSES}/{name}")).status_code for name in first]
            assert sorted(there) == [200, 200, 404, 404], "they came from both"


async def test_what_the_engine_makes_in_the_background_can_be_cancelled(
    engine: Engine, client: httpx.AsyncClient
) -> None:
    async with Emulator(EmulatorConfig(response_store=True)) as other:
        log = LOGS / "router-background.log"
        with start_router([engine.url, other.url], log, "--policy", "round_robin") as router:
            body = {"model": "tiny", "input": "hello", "max_output_tokens": 4000, "background": True}
            for _ in range(2):
                queued = (await client.post(router.url + RESPONSES, json=body)).raise_for_status().json()
                assert queued["status"] in ("queued", "in_progress")
                cancelled = await client.post(f"{router.url}{RESPONSES}/{queued['id']}/cancel")
                assert cancelled.raise_for_status().json()["status"] in ("cancelled", "completed")
    await engine.settle(client)


def source(name: str) -> str:
    """Of a module of the engine's OpenAI entrypoints, strings that are split over lines joined."""
    (file,) = ROOT.glob(f".engine/venv/lib/python3*/site-packages/sglang/srt/entrypoints/openai/{name}.py")
    return re.sub(r'"\s+f?"', "", file.read_text())


def test_the_emulated_words_are_the_engines() -> None:
    serving = source("serving_responses")
    assert str(stored.disabled("x")) in serving
    for name in ("x", "resp_x"):
        with pytest.raises(ApiError) as refused:
            ResponseStore().find(name)
        assert str(refused.value).replace(f"'{name}'", "'{response_id}'") in serving


def test_what_the_router_relies_on() -> None:
    serving, protocol = source("serving_responses"), source("protocol")
    assert "self.response_store: dict[str, ResponsesResponse] = {}" in serving, "it is in the process"
    assert "persist = self.enable_response_store and bool(request.store)" in serving
    request = protocol.split("class ResponsesRequest(")[1].split("\nclass ")[0]
    assert "store: Optional[bool] = True" in request, "kept unless it says otherwise"
    assert 'f"resp_{uuid.uuid4().hex}"' in request
    response = protocol.split("class ResponsesResponse(")[1].split("\nclass ")[0]
    assert re.search(r'"""\s+id: str', response), "the id is the first field"
