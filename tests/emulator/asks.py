"""Requests to an emulated replica, whole or step by step."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from sim.emulator import Emulator
from tests.emulator.recorded import parse_event
from tests.fakes.client import Answer, RawClient, get, post

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Say hello to the sea, and to the mountains behind it. " * 4}]
ENDLESS = {"max_tokens": 4000, "ignore_eos": True}
"""12 s of the emulated hardware's time, longer than any test waits."""


@asynccontextmanager
async def connection(replica: Emulator) -> AsyncIterator[RawClient]:
    client = await RawClient.connect(replica.port)
    try:
        yield client
    finally:
        client.close()


async def ask(replica: Emulator, target: str, body: dict[str, Any] | None = None, *headers: str) -> Answer:
    """The answer to a GET, or to a POST when there is a body."""
    async with connection(replica) as client:
        return await client.ask(get(target, *headers) if body is None else raw(target, body, *headers))


async def ask_json(replica: Emulator, target: str, body: dict[str, Any] | None = None, *headers: str) -> Any:
    """The JSON of an answer that must be a 200."""
    answer = await ask(replica, target, body, *headers)
    assert answer.status == 200, answer.body
    return json.loads(answer.body)


async def chat(replica: Emulator, **fields: Any) -> Any:
    """A chat completion's JSON."""
    return await ask_json(replica, CHAT, {"messages": HELLO, **fields})


async def stream(replica: Emulator, target: str = CHAT, **fields: Any) -> list[tuple[str, Any]]:
    """All events of a stream."""
    answer = await ask(replica, target, {"messages": HELLO, "stream": True, **fields})
    assert answer.status == 200, answer.body
    return [parse_event(chunk) for chunk in answer.chunks]


def raw(target: str, body: dict[str, Any], *headers: str) -> bytes:
    return post(target, json.dumps(body).encode(), *headers)


def begin(client: RawClient, target: str = CHAT, **fields: Any) -> None:
    """Sends a request that takes longer than the test, without waiting for anything."""
    client.send(raw(target, {"messages": HELLO, **ENDLESS, **fields}))
