"""The response store, as SGLang 0.5.23's serving_responses module reads."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from sim.emulator import Emulator, EmulatorConfig
from tests.emulator.asks import ENDLESS, ask, ask_json, connection, stream
from tests.fakes.client import Answer, post
from tests.fakes.wire import eventually

RESPONSES = "/v1/responses"
LONG = "Tell me of the sea, and of the mountains behind it. " * 20


@pytest.fixture
async def replica() -> AsyncIterator[Emulator]:
    async with Emulator(EmulatorConfig(time_scale=0.0001, response_store=True)) as emulator:
        yield emulator


@pytest.fixture
async def slow_store() -> AsyncIterator[Emulator]:
    async with Emulator(EmulatorConfig(response_store=True)) as emulator:
        yield emulator


async def respond(replica: Emulator, given: Any = "hello", **fields: Any) -> Any:
    return await ask_json(replica, RESPONSES, {"input": given, "max_output_tokens": 8, **fields})


async def cancel(replica: Emulator, response_id: str) -> Answer:
    async with connection(replica) as client:
        return await client.ask(post(f"{RESPONSES}/{response_id}/cancel", b""))


def error_of(answer: Answer) -> tuple[int, dict[str, Any]]:
    return answer.status, json.loads(answer.body)["error"]


async def test_what_is_kept_can_be_asked_for_and_gone_on_from(replica: Emulator) -> None:
    first = await respond(replica, LONG)
    assert (await ask_json(replica, f"{RESPONSES}/{first['id']}")) == first
    second = await respond(replica, "go on", previous_response_id=first["id"])
    assert second["previous_response_id"] == first["id"]
    prompt, cached = second["usage"]["input_tokens"], second["usage"]["input_tokens_details"]["cached_tokens"]
    assert prompt > first["usage"]["input_tokens"] + first["usage"]["output_tokens"], "the whole conversation is read"
    assert cached > first["usage"]["input_tokens"] - 16, "and found"
    third = await respond(replica, "on", previous_response_id=second["id"])
    assert third["usage"]["input_tokens"] > prompt


async def test_a_stream_is_kept_when_it_is_whole(replica: Emulator) -> None:
    events = await stream(replica, RESPONSES, input="hello", messages=None)
    response = events[-1][1]["response"]
    assert (await ask_json(replica, f"{RESPONSES}/{response['id']}")) == response
    await respond(replica, "go on", previous_response_id=response["id"])


async def test_what_must_not_be_stored_is_not(replica: Emulator) -> None:
    response = await respond(replica, store=False)
    assert response["store"] is False
    status, error = error_of(await ask(replica, f"{RESPONSES}/{response['id']}"))
    assert (status, error["code"]) == (404, 404)


@pytest.mark.parametrize("path", ["", "/cancel"])
async def test_what_is_not_there(replica: Emulator, path: str) -> None:
    answers = [
        await (cancel(replica, name) if path else ask(replica, f"{RESPONSES}/{name}")) for name in ("resp_1", "other")
    ]
    unknown, invalid = map(error_of, answers)
    assert unknown == (404, _error("Response with id 'resp_1' not found.", "response_id", 404))
    message = "Invalid 'response_id': 'other'. Expected an ID that begins with 'resp'."
    assert invalid == (400, _error(message, "response_id", 400))


async def test_going_on_from_what_is_not_there(replica: Emulator) -> None:
    answer = await ask(replica, RESPONSES, {"input": "hello", "previous_response_id": "resp_1"})
    assert error_of(answer) == (404, _error("Response with id 'resp_1' not found.", "response_id", 404))


@pytest.mark.parametrize(("field", "value"), [("previous_response_id", "resp_1"), ("background", True)])
async def test_without_the_store(fast: Emulator, field: str, value: Any) -> None:
    refused = [
        await ask(fast, RESPONSES, {"input": "hello", field: value}),
        await ask(fast, f"{RESPONSES}/resp_1"),
        await cancel(fast, "resp_1"),
    ]
    found = [error_of(answer) for answer in refused]
    assert [(status, error["param"]) for status, error in found] == [
        (400, field),
        (400, "response_id"),
        (400, "response_id"),
    ]
    assert all(error["message"].startswith("Response store is disabled.") for _, error in found)


async def test_in_the_background(replica: Emulator) -> None:
    queued = await respond(replica, background=True)
    assert (queued["status"], queued["output"], queued["usage"]) == ("queued", [], None)
    await eventually(lambda: not replica.engine.live)
    done = await ask_json(replica, f"{RESPONSES}/{queued['id']}")
    assert done["status"] in ("completed", "incomplete")
    assert json.loads((await cancel(replica, queued["id"])).body) == done, "it is too late"
    refused = await ask(replica, RESPONSES, {"input": "hello", "background": True, "store": False})
    assert error_of(refused) == (400, _error("background=true requires store=true.", "store", 400))


async def test_cancelling(slow_store: Emulator) -> None:
    fields = {"background": True, "max_output_tokens": ENDLESS["max_tokens"], "ignore_eos": True}
    queued = await respond(slow_store, **fields)
    answer = await cancel(slow_store, queued["id"])
    assert (answer.status, json.loads(answer.body)["status"]) == (200, "cancelled")
    await eventually(lambda: not slow_store.engine.live)
    assert (await ask_json(slow_store, f"{RESPONSES}/{queued['id']}"))["status"] == "cancelled"


async def test_a_client_may_choose_the_id(replica: Emulator) -> None:
    assert (await respond(replica, request_id="resp_mine"))["id"] == "resp_mine"


def _error(message: str, param: str, code: int) -> dict[str, Any]:
    return {"message": message, "type": "invalid_request_error", "param": param, "code": code}
