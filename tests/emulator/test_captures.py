"""The emulator's answers beside those of a real SGLang 0.5.23 server, field by field."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest

from sim.emulator import Emulator, EmulatorConfig
from tests.emulator import recorded
from tests.emulator.recorded import CAPTURES, Recorded
from tests.fakes.client import Answer, RawClient, get, post
from tests.fakes.wire import eventually

CONFIG = EmulatorConfig(
    model="tiny",
    time_scale=0.001,
    kv_tokens=20_000,
    context_length=8192,
    max_running_requests=4,
    max_queued_requests=4,
)
"""The recorded server's settings."""

LONG = {"role": "user", "content": "word " * 20_000}
"""The recorder cut long bodies out of its request line."""
PARAGRAPH = {"role": "user", "content": "Redistribution and use in source and binary forms, " * 32}

JSON_ANSWERS = [
    "cached_1_first.txt",
    "cached_2_same.txt",
    "cached_3_shared_prefix.txt",
    "err_404.txt",
    "err_405.txt",
    "err_bad_json.txt",
    "err_bad_temperature.txt",
    "err_bad_temperature_stream.txt",
    "err_bad_type.txt",
    "err_empty_body.txt",
    "err_empty_messages.txt",
    "err_loads_bad_dp_rank.txt",
    "err_max_tokens_too_large.txt",
    "err_missing_messages.txt",
    "err_models_nosuch.txt",
    "err_too_long_nonstream.txt",
    "err_too_long_stream.txt",
    "err_unknown_field.txt",
    "err_unknown_lora.txt",
    "err_unknown_model.txt",
    "err_wrong_content_type.txt",
    "generate_nonstream.txt",
    "get_load_404.txt",
    "nonstream.txt",
    "nonstream_n2.txt",
    "nonstream_rid.txt",
    "responses.txt",
    "tokenize.txt",
    "v1_loads_idle.json.txt",
    "v1_models.txt",
]
STREAMS = [
    "anthropic_messages_stream.txt",
    "cached_4_stream.txt",
    "completions_stream.txt",
    "generate_stream.txt",
    "stream_continuous_usage.txt",
    "stream_include_usage.txt",
    "stream_no_options.txt",
    "stream_x_request_id.txt",
]
PLAIN_ANSWERS = ["abort_request.txt", "flush_cache.txt", "health_generate_ok.txt", "health_ok.txt", "ready_ok.txt"]
PARTIAL_ANSWERS = ["get_model_info.txt", "get_server_info.txt", "model_info.txt", "server_info.txt"]
"""Hundreds of fields, of which the emulator has those a router may look at."""


@pytest.fixture
async def replica() -> AsyncIterator[Emulator]:
    async with Emulator(CONFIG) as emulator:
        yield emulator


async def ask(replica: Emulator, capture: Recorded, *headers: str) -> Answer:
    """The emulator's answer to a recorded request."""
    client = await RawClient.connect(replica.port)
    try:
        return await client.ask(request(capture, *headers))
    finally:
        client.close()


def request(capture: Recorded, *headers: str) -> bytes:
    given = [f"{name}: {value}" for name, value in capture.headers.items()] + list(headers)
    if capture.method == "GET":
        return get(capture.target, *given)
    raw = post(capture.target, body(capture), *given)
    # The recorder's line does not say which wrong type it had sent.
    return raw.replace(b"application/json", b"text/plain") if b"Unsupported Media" in capture.answer.body else raw


def body(capture: Recorded) -> bytes:
    cut = re.search(rb"\.\.\.\[(\d+) bytes\]\.\.\.", capture.body)
    if cut is None and b'"content": "Copyright' not in capture.body:
        return capture.body
    message = LONG if cut and int(cut[1]) > 50_000 else PARAGRAPH
    rest: dict[str, Any] = {"max_tokens": 16, "temperature": 0, "ignore_eos": True}
    if capture.answer.chunks:
        rest |= {"stream": True, "stream_options": {"include_usage": True}}
    return json.dumps({"model": "tiny", "messages": [message], **rest}).encode()


def test_every_capture_is_compared() -> None:
    elsewhere = {
        "abort_request_stream_tail.txt",
        "err_queue_full_nonstream.txt",
        "err_queue_full_stream.txt",
        "err_wrong_api_key.txt",
        "metrics_after.txt",
        "stream_n2.txt",
        "v1_loads_after.json.txt",
        "v1_loads_prometheus_idle.txt",
        "v1_loads_under_load.json.txt",
    }
    listed = [*JSON_ANSWERS, *STREAMS, *PLAIN_ANSWERS, *PARTIAL_ANSWERS, *elsewhere]
    assert sorted(listed) == sorted(path.name for path in CAPTURES.iterdir())


@pytest.mark.parametrize("name", JSON_ANSWERS)
async def test_json_answer(replica: Emulator, name: str) -> None:
    capture = recorded.load(name)
    given = await ask(replica, capture)
    assert given.status == capture.answer.status
    assert recorded.header_names(given) == recorded.header_names(capture.answer)
    assert given.header("content-type") == capture.answer.header("content-type")
    assert given.header("allow") == capture.answer.header("allow")
    expected = recorded.signature(json.loads(capture.answer.body))
    assert recorded.signature(json.loads(given.body)) == expected


@pytest.mark.parametrize("name", STREAMS)
async def test_stream(replica: Emulator, name: str) -> None:
    capture = recorded.load(name)
    given = await ask(replica, capture)
    assert given.status == capture.answer.status
    assert recorded.header_names(given) == recorded.header_names(capture.answer)
    assert given.header("content-type") == capture.answer.header("content-type")
    assert recorded.events(given) == recorded.events(capture.answer)


@pytest.mark.parametrize("name", PLAIN_ANSWERS)
async def test_plain_answer(replica: Emulator, name: str) -> None:
    capture = recorded.load(name)
    given = await ask(replica, capture)
    assert given.status == capture.answer.status
    assert recorded.header_names(given) == recorded.header_names(capture.answer)
    assert given.body == capture.answer.body


@pytest.mark.parametrize("name", PARTIAL_ANSWERS)
async def test_info_has_only_fields_of_the_engine(replica: Emulator, name: str) -> None:
    capture = recorded.load(name)
    given = json.loads((await ask(replica, capture)).body)
    expected = json.loads(capture.answer.body)
    assert _types(given, expected) == []


def _types(given: Any, expected: Any, at: str = "") -> list[str]:
    """Where fields are unknown to the engine or of another type; null matches any, as it does for unset arguments."""
    if isinstance(given, dict) and isinstance(expected, dict):
        unknown = [f"{at}.{key} is not the engine's" for key in given.keys() - expected.keys()]
        inner = [_types(given[key], expected[key], f"{at}.{key}") for key in given.keys() & expected.keys()]
        return unknown + [problem for problems in inner for problem in problems]
    if isinstance(given, list) and isinstance(expected, list):
        return [problem for pair in zip(given, expected, strict=False) for problem in _types(*pair, f"{at}[]")]
    if given is None or expected is None or type(given) is type(expected):
        return []
    return [f"{at}: {given!r} against {expected!r}"]


async def test_stream_of_two_choices(replica: Emulator) -> None:
    """Each choice has an id of its own and how they interleave is chance; but all ends come last, with one id."""
    capture = recorded.load("stream_n2.txt")
    given = await ask(replica, capture)
    assert _by_choice(given) == _by_choice(capture.answer)
    for answer in (given, capture.answer):
        *tokens, end, last = [recorded.parse_event(chunk)[1] for chunk in answer.chunks[:-1]]
        assert [end["choices"][0]["index"], last["choices"][0]["index"]] == [0, 1]
        assert len({data["id"] for data in tokens}) == 2
        assert end["id"] == last["id"] == tokens[-1]["id"]
        assert answer.chunks[-1] == b"data: [DONE]\n\n"


def _by_choice(answer: Answer) -> dict[int, list[Any]]:
    choices: dict[int, list[Any]] = {0: [], 1: []}
    for chunk in answer.chunks[:-1]:
        data = recorded.parse_event(chunk)[1]
        choices[data["choices"][0]["index"]].append(recorded.signature(data))
    return choices


@pytest.mark.parametrize("name", ["err_queue_full_nonstream.txt", "err_queue_full_stream.txt"])
async def test_full_queue(name: str) -> None:
    capture = recorded.load(name)
    full = EmulatorConfig(model="tiny", max_running_requests=1, max_queued_requests=0)
    asked = {"model": "tiny", "messages": [PARAGRAPH], "max_tokens": 4000, "ignore_eos": True}
    if capture.answer.chunks:
        asked |= {"stream": True, "stream_options": {"include_usage": True}}
    async with Emulator(full) as replica:
        first = await RawClient.connect(replica.port)
        first.send(post(body=json.dumps(asked).encode()))
        await eventually(lambda: replica.running == 1)
        second = await RawClient.connect(replica.port)
        given = await second.ask(post(body=json.dumps(asked).encode()))
        first.close()
        second.close()
    assert given.status == capture.answer.status
    assert recorded.header_names(given) == recorded.header_names(capture.answer)
    if capture.answer.chunks:
        assert recorded.events(given) == recorded.events(capture.answer)
        assert given.chunks[0] == capture.answer.chunks[0]
    else:
        assert given.body == capture.answer.body


async def test_tail_of_an_aborted_stream() -> None:
    capture = recorded.load("abort_request_stream_tail.txt")
    abort = recorded.load("abort_request.txt")
    asked = {"model": "tiny", "messages": [PARAGRAPH], "max_tokens": 4000, "ignore_eos": True, "rid": "abort-me"}
    async with Emulator(EmulatorConfig(model="tiny")) as replica:
        client = await RawClient.connect(replica.port)
        client.send(post(body=json.dumps({**asked, "stream": True}).encode()))
        await client.head()
        assert (await ask(replica, abort)).status == 200
        given = Answer("", 200, "", [])
        while chunk := await client.chunk():
            given.chunks.append(chunk)
        client.close()
    assert recorded.events(given)[-3:] == recorded.events(capture.answer)[-3:]


async def test_unauthorized() -> None:
    capture = recorded.load("err_wrong_api_key.txt")
    async with Emulator(EmulatorConfig(api_key="right")) as replica:
        client = await RawClient.connect(replica.port)
        given = await client.ask(post("/v1/chat/completions", b"{}", "Authorization: Bearer wrong"))
        client.close()
    assert given.status == capture.answer.status
    assert recorded.header_names(given) == recorded.header_names(capture.answer)
    assert given.body == capture.answer.body


async def test_loads_under_load() -> None:
    """Four running and four waiting, as when it was recorded."""
    capture = recorded.load("v1_loads_under_load.json.txt")
    config = EmulatorConfig(model="tiny", kv_tokens=20_000, max_running_requests=4, max_queued_requests=4)
    async with Emulator(config) as replica:
        clients = [await RawClient.connect(replica.port) for _ in range(8)]
        for client in clients:
            asked = {"messages": [PARAGRAPH], "max_tokens": 4000, "ignore_eos": True}
            client.send(post(body=json.dumps(asked).encode()))
        await eventually(lambda: replica.engine.schedulers[0].snapshot["num_running_reqs"] == 4)
        await eventually(lambda: replica.engine.schedulers[0].snapshot["num_waiting_reqs"] == 4)
        given = await ask(replica, capture)
        for client in clients:
            client.close()
    assert recorded.signature(json.loads(given.body)) == recorded.signature(json.loads(capture.answer.body))


async def test_loads_after_load(replica: Emulator) -> None:
    """Idle again, with totals that say what was done."""
    capture = recorded.load("v1_loads_after.json.txt")
    await ask(replica, recorded.load("nonstream.txt"))
    load = json.loads((await ask(replica, capture)).body)
    assert recorded.signature(load) == recorded.signature(json.loads(capture.answer.body))
    assert load["loads"][0]["total_prefill_uncached_tokens"] == replica.log[0].prompt_tokens
    steps, batches, *_ = load["loads"][0]["decode_moments"]
    assert (steps, batches) == (15, 15)


async def test_loads_in_prometheus_format(replica: Emulator) -> None:
    capture = recorded.load("v1_loads_prometheus_idle.txt")
    given = await ask(replica, capture)
    assert given.header("content-type") == capture.answer.header("content-type")

    def names(answer: Answer) -> list[str]:
        return [line.rsplit(" ", 1)[0] for line in answer.body.decode().splitlines()]

    assert names(given) == names(capture.answer)


async def test_metrics_are_the_engines(replica: Emulator) -> None:
    """Each series, with its labels' names, is one the engine has."""
    capture = recorded.load("metrics_after.txt")
    for _ in range(2):
        await ask(replica, recorded.load("cached_1_first.txt"))
    client = await RawClient.connect(replica.port)
    given = await client.ask(get("/metrics"))
    client.close()
    assert given.header("content-type") == capture.answer.header("content-type")
    ours = _series(given.body.decode())
    assert "sglang:cached_tokens_total" in ours
    engines = _series(capture.answer.body.decode())
    assert {name: engines.get(name) for name in ours} == ours


def _series(text: str) -> dict[str, frozenset[str]]:
    """Label names of each metric."""
    found = re.findall(r"^(sglang:\w+)\{(.*)\} ", text, flags=re.MULTILINE)
    return {name: frozenset(re.findall(r'(\w+)="', labels)) for name, labels in found}
