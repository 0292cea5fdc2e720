"""Server-sent events, one a chunk, and what happens when the client leaves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from sim.emulator.answer import Answer
from sim.emulator.engine import Engine
from sim.emulator.errors import QUEUE_FULL, ClientGone, StreamCut

DONE = b"data: [DONE]\n\n"


def data(payload: object) -> bytes:
    """An event without a name."""
    return b"data: " + msgspec.json.encode(payload) + b"\n\n"


def named(payload: dict[str, Any]) -> bytes:
    """An event named by its payload's `type`."""
    return f"event: {payload['type']}\n".encode() + data(payload)


def queue_full(*, retryable: bool | None = None) -> bytes:
    """The first event of a stream that was refused. SGLang writes this one with spaces in the JSON."""
    error = {"object": "error", "message": QUEUE_FULL, "type": "SERVICE_UNAVAILABLE", "param": None, "code": 503}
    if retryable is not None:
        error["retryable"] = retryable
    return b"data: " + json.dumps({"error": error}).encode() + b"\n\n"


class EventStream(StreamingResponse):
    """Events of an answer. Whichever way it ends, the answer's sequences have ended then."""

    def __init__(self, engine: Engine, events: AsyncIterator[bytes], answer: Answer | None = None) -> None:
        super().__init__(self._cut(events), media_type="text/event-stream")
        self._engine = engine
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            if self._answer is not None:
                self._answer.abort()

    async def _cut(self, events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        sent = 0
        async for event in events:
            if sent == self._engine.faults.die_mid_stream_after:
                raise StreamCut
            yield event
            sent += 1


async def attended(request: Request, answer: Answer, work: Awaitable[None]) -> None:
    """Waits for the work. When the client leaves first, the answer is aborted and ClientGone raised."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            config = answer.engine.config
            await asyncio.wait((working,), timeout=config.disconnect_seconds * config.time_scale)
            raise ClientGone
    except BaseException:
        answer.abort()
        raise
    finally:
        working.cancel()
        watching.cancel()


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
