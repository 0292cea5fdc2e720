"""Reuse of prompts and answers."""

from __future__ import annotations

from sim.emulator import Emulator, EmulatorConfig
from tests.emulator.asks import HELLO, ask, ask_json, begin, chat, connection
from tests.fakes.wire import eventually


async def test_the_next_turn_is_cached_with_the_answer(fast: Emulator) -> None:
    first = await chat(fast, max_tokens=20)
    answer = first["choices"][0]["message"]
    history = [*HELLO, {"role": "assistant", "content": answer["content"]}, {"role": "user", "content": "Go on."}]
    second = await chat(fast, messages=history)
    stored = first["usage"]["prompt_tokens"] + 20 - 1
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == stored // 16 * 16


async def test_apis_share_the_cache(fast: Emulator) -> None:
    """The same conversation renders to the same tokens, whichever way it comes."""
    await chat(fast)
    again = await ask_json(fast, "/v1/messages", {"messages": HELLO, "max_tokens": 1})
    assert again["usage"]["cache_read_input_tokens"] > 0
    blocks = [{"type": "text", "text": HELLO[0]["content"], "cache_control": {"type": "ephemeral"}}]
    asked = {"messages": [{"role": "user", "content": blocks}], "max_tokens": 1}
    assert (await ask_json(fast, "/v1/messages", asked))["usage"] == again["usage"]
    given = await ask_json(fast, "/v1/responses", {"input": HELLO, "max_output_tokens": 1})
    cached = given["usage"]["input_tokens_details"]["cached_tokens"]
    assert cached == again["usage"]["cache_read_input_tokens"]


async def test_a_salt_isolates(fast: Emulator) -> None:
    cached = []
    for salt in ({}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"cache_salt": "a"}, {"extra_key": "c"}):
        usage = (await chat(fast, **salt))["usage"]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"] > 0)
    assert cached == [False, False, False, True, False]


async def test_flush_forgets(fast: Emulator) -> None:
    await chat(fast)
    assert (await ask(fast, "/flush_cache")).status == 200
    assert (await chat(fast))["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


async def test_flush_is_refused_while_something_runs(slow: Emulator) -> None:
    async with connection(slow) as client:
        begin(client)
        await eventually(lambda: slow.running)
        answer = await ask(slow, "/flush_cache")
        assert (answer.status, answer.body) == (400, b"Flush cache failed.\n")


async def test_without_the_cache_report() -> None:
    async with Emulator(EmulatorConfig(time_scale=0.0001, cache_report=False)) as replica:
        await chat(replica)
        assert (await chat(replica))["usage"]["prompt_tokens_details"] is None
        message = await ask_json(replica, "/v1/messages", {"messages": HELLO, "max_tokens": 1})
        assert "cache_read_input_tokens" not in message["usage"]
        # /generate tells it anyway.
        asked = {"text": "word " * 40, "sampling_params": {"max_new_tokens": 1}}
        await ask_json(replica, "/generate", asked)
        assert (await ask_json(replica, "/generate", asked))["meta_info"]["cached_tokens"] == 48
