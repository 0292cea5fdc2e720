"""Full queues, leaving clients and aborts."""

from __future__ import annotations

import json

import pytest

from sim.emulator import Emulator, EmulatorConfig
from tests.emulator.asks import CHAT, HELLO, ask, begin, chat, connection, stream
from tests.emulator.recorded import parse_event
from tests.fakes.wire import eventually


async def test_the_queue_has_a_limit(slow: Emulator) -> None:
    async with connection(slow) as running, connection(slow) as waiting:
        begin(running)
        begin(waiting)
        await eventually(lambda: (slow.running, slow.queued) == (1, 1))
        answer = await ask(slow, CHAT, {"messages": HELLO})
        assert (answer.status, json.loads(answer.body)["code"]) == (503, 503)
        assert slow.rejected == 1
        assert slow.log[-1].error == 503
        refused = await stream(slow, "/v1/messages", max_tokens=1)
        assert [(name, data["error"]["type"]) for name, data in refused] == [("error", "overloaded_error")]
        refused = await stream(slow, "/generate", text="hello")
        assert refused[0][1]["error"] == {**refused[0][1]["error"], "code": 503, "retryable": False}
        refused = await stream(slow, "/v1/responses", input="hello")
        assert [name for name, _ in refused] == ["response.failed"]


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("target", [CHAT, "/v1/messages", "/v1/responses", "/generate"])
async def test_a_client_that_leaves_frees_its_slot(slow: Emulator, target: str, streaming: bool) -> None:
    async with connection(slow) as client:
        begin(client, target, stream=streaming, input="x", text="x", max_output_tokens=4000, max_new_tokens=4000)
        await eventually(lambda: slow.running)
    await eventually(lambda: slow.running == 0)
    assert slow.aborted == 1
    assert slow.log[-1].finish_reason == "abort"


async def test_a_client_that_leaves_the_queue(slow: Emulator) -> None:
    async with connection(slow) as running:
        begin(running)
        await eventually(lambda: slow.running)
        async with connection(slow) as waiting:
            begin(waiting, stream=True)
            await eventually(lambda: slow.queued)
        await eventually(lambda: slow.queued == 0)
        assert slow.running == 1


async def test_a_leaving_client_may_be_noticed_late() -> None:
    """As the real engine does, for non-streams; the request goes on until then."""
    async with Emulator(EmulatorConfig(disconnect_seconds=0.3)) as replica:
        async with connection(replica) as client:
            begin(client)
            await eventually(lambda: replica.running)
        produced = replica.engine.schedulers[0].replica.running[0].produced
        await eventually(lambda: replica.running == 0)
        assert replica.log[-1].completion_tokens > produced


async def test_abort_by_id(slow: Emulator) -> None:
    async with connection(slow) as client:
        begin(client, rid="mine", stream=True)
        await eventually(lambda: slow.running)
        assert (await ask(slow, "/abort_request", {"rid": "another"})).status == 200
        assert slow.running == 1
        assert (await ask(slow, "/abort_request", {"rid": "mine"})).status == 200
        assert slow.running == 0
        answer = await client.answer()
        assert parse_event(answer.chunks[-2])[1]["choices"][0]["finish_reason"] == "abort"


async def test_abort_all(slow: Emulator) -> None:
    async with connection(slow) as one, connection(slow) as two:
        begin(one)
        begin(two)
        await eventually(lambda: slow.queued)
        await ask(slow, "/abort_request", {"abort_all": True})
        for client in (one, two):
            assert json.loads((await client.answer()).body)["choices"][0]["finish_reason"] == "abort"


async def test_an_id_lives_once(slow: Emulator) -> None:
    async with connection(slow) as client:
        begin(client, rid="same")
        await eventually(lambda: slow.running)
        answer = await ask(slow, CHAT, {"messages": HELLO, "rid": "same"})
        assert answer.status == 400
        assert json.loads(answer.body)["message"] == "Duplicate request ID detected: same"
    await eventually(lambda: slow.running == 0)
    assert (await chat(slow, rid="same", max_tokens=1))["id"] == "same"
