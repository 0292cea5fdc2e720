"""A full queue sends a request elsewhere; only full queues everywhere refuse it."""

from __future__ import annotations

import json

import httpx
import pytest

from tests.engine.asks import INFERENCE
from tests.engine.engine import Engine
from tests.engine.seen import entry
from tests.engine.sessions import sessions_at
from tests.engine.wire import ask
from tests.fakes.process import Router

pytestmark = pytest.mark.engine

FAILURES = (b"queue is full", b'"error":{', b'"error": {', b"event: error", b"response.failed", b'"abort"')


async def test_a_full_home_sends_its_sessions_to_the_other(
    router: Router, engines: tuple[Engine, Engine], client: httpx.AsyncClient
) -> None:
    full, other = engines
    sessions = await sessions_at(full, len(INFERENCE), router, client)
    outcomes = {}
    async with full.filled(client):
        for session, request in zip(sessions, INFERENCE, strict=True):
            request_id = f"overload-{request.name}"
            headers = {"modal-session-id": session, "x-request-id": request_id}
            answer = await ask(router.port, request.path, request.body, headers)
            line = await entry(router, request_id)
            seen = [word.decode() for word in FAILURES if word in answer.body]
            outcomes[request.name] = (answer.status, answer.whole, seen, line.replica, line.tries)
    assert outcomes == {request.name: (200, True, [], other.url, 2) for request in INFERENCE}


async def test_full_queues_everywhere_are_a_503_with_retry_after(
    router: Router, engines: tuple[Engine, Engine], client: httpx.AsyncClient
) -> None:
    async with engines[0].filled(client), engines[1].filled(client):
        answers = {request.name: await ask(router.port, request.path, request.body) for request in INFERENCE}
    assert {name: answer.status for name, answer in answers.items()} == {request.name: 503 for request in INFERENCE}
    for answer in answers.values():
        assert answer.whole
        assert int(answer.headers["retry-after"]) > 0
        assert answer.headers["content-type"] == "application/json"
        error = json.loads(answer.body)["error"]
        assert error["code"] == "queue_full"
        assert error["message"]
        assert error["type"]
