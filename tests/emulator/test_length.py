"""How long answers are, how they end, and what they say."""

from __future__ import annotations

import pytest

from sim.emulator import Emulator, EmulatorConfig
from tests.emulator.asks import CHAT, HELLO, ask, chat, stream


@pytest.mark.parametrize(
    ("fields", "tokens", "reason"),
    [
        ({}, 32, "stop"),
        ({"max_tokens": 5}, 5, "length"),
        ({"max_completion_tokens": 5}, 5, "length"),
        ({"max_tokens": 500}, 32, "stop"),
        ({"max_tokens": 500, "ignore_eos": True}, 500, "length"),
    ],
)
async def test_length(fast: Emulator, fields: dict[str, object], tokens: int, reason: str) -> None:
    answer = await chat(fast, **fields)
    choice = answer["choices"][0]
    assert answer["usage"]["completion_tokens"] == tokens
    assert choice["finish_reason"] == reason
    assert (choice["matched_stop"] is None) == (reason == "length")
    assert len(choice["message"]["content"]) == 4 * tokens


async def test_the_same_prompt_has_the_same_answer(fast: Emulator) -> None:
    one, other = await chat(fast), await chat(fast)
    assert one["choices"] == other["choices"]
    assert one["id"] != other["id"]
    different = await chat(fast, messages=[{"role": "user", "content": "Something else."}])
    assert different["choices"] != one["choices"]


async def test_tools_are_never_called(fast: Emulator) -> None:
    tool = {"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}
    choice = (await chat(fast, tools=[tool]))["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert "tool_calls" not in choice["message"]


async def test_the_streamed_text_is_the_whole_text(fast: Emulator) -> None:
    whole = (await chat(fast))["choices"][0]["message"]["content"]
    parts = [data["choices"][0]["delta"].get("content", "") for _, data in (await stream(fast))[:-1]]
    assert "".join(parts) == whole
    message = [data for _, data in await stream(fast, "/v1/messages", max_tokens=100)]
    deltas = [data["delta"]["text"] for data in message if data["type"] == "content_block_delta"]
    assert "".join(deltas) == whole


async def test_prompt_and_answer_beyond_the_context() -> None:
    async with Emulator(EmulatorConfig(time_scale=0.0001, context_length=100)) as replica:
        answer = await ask(replica, CHAT, {"messages": HELLO, "max_tokens": 60})
        assert answer.status == 400
        assert "You requested a total of 117 tokens: 57 tokens from the input messages" in answer.body.decode()


async def test_a_prompt_that_never_fits_the_pool() -> None:
    async with Emulator(EmulatorConfig(time_scale=0.0001, kv_tokens=64)) as replica:
        answer = await ask(replica, CHAT, {"messages": HELLO})
        assert answer.status == 400
        assert "exceeds the maximum allowed length" in answer.body.decode()
