"""What streams carry, and when."""

from __future__ import annotations

import pytest

from sim.emulator import Emulator, EmulatorConfig
from tests.emulator.asks import ask, begin, connection, stream
from tests.emulator.recorded import parse_event
from tests.fakes.wire import eventually


async def test_usage_in_streams_only_when_asked(fast: Emulator) -> None:
    def usage(events: list[tuple[str, dict[str, object]]]) -> bool:
        return bool(events[-2][1].get("usage"))

    assert not usage(await stream(fast))
    assert usage(await stream(fast, stream_options={"include_usage": True}))
    async with Emulator(EmulatorConfig(time_scale=0.0001, default_include_usage=True)) as replica:
        assert usage(await stream(replica))
        assert not usage(await stream(replica, stream_options={"include_usage": False}))


async def test_chat_headers_come_with_the_first_token(slow: Emulator) -> None:
    """And those of /generate and /v1/messages at once, while the request still waits."""
    async with connection(slow) as running, connection(slow) as waiting:
        begin(running)
        await eventually(lambda: slow.running)
        begin(waiting, stream=True)
        await eventually(lambda: slow.queued)
        assert (await ask(slow, "/ready")).status == 200
        assert waiting.received == 0
        running.reset()
        assert (await waiting.head()).status == 200
        assert parse_event(await waiting.chunk())[1]["choices"][0]["delta"]["role"] == "assistant"


@pytest.mark.parametrize("target", ["/generate", "/v1/messages"])
async def test_headers_at_once(slow: Emulator, target: str) -> None:
    async with connection(slow) as running, connection(slow) as waiting:
        begin(running)
        await eventually(lambda: slow.running)
        begin(waiting, target, stream=True, text="hello")
        assert (await waiting.head()).status == 200
        assert slow.queued == 1
        assert not waiting.buffer


async def test_codex_events(fast: Emulator) -> None:
    events = await stream(fast, "/v1/responses", input="hello", messages=None)
    names = list(dict.fromkeys(name for name, _ in events))
    assert names == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    assert all(name == data["type"] for name, data in events)
    response = events[-1][1]["response"]
    assert response["status"] == "completed"
    assert response["usage"]["input_tokens_details"] == {"cached_tokens": 0, "cache_write_tokens": 0}
    text = "".join(data["delta"] for name, data in events if name == "response.output_text.delta")
    assert response["output"][0]["content"][0]["text"] == text
