"""What comes through the router is what the engine said, byte for byte."""

from __future__ import annotations

import re

import httpx
import pytest

from tests.engine.asks import INFERENCE, MISTAKES, Ask
from tests.engine.engine import Engine
from tests.engine.seen import entry
from tests.engine.wire import Answer, ask
from tests.fakes.process import Router

pytestmark = pytest.mark.engine

ATTEMPTS = 25
"""An engine puts two tokens in one event when its HTTP side falls behind, so two of its own answers can differ: it is
asked until one of those that came through the router is one of those it gave itself."""
ASKS = {request.name: request for request in (*INFERENCE, *MISTAKES)}

_VARYING = (
    (re.compile(rb"[0-9a-f]{32}"), b"ID"),
    (re.compile(rb'"(created|created_at|completed_at)":\d+'), rb'"\1":0'),
    (re.compile(rb":-?\d+\.\d+(e-?\d+)?"), b":0.0"),  # times in seconds, all of them
)


def comparable(answer: Answer) -> tuple[int, str, bool, bytes]:
    """Status, type, whether it is whole, and the body with ids and times made equal."""
    body = answer.body
    for pattern, same in _VARYING:
        body = pattern.sub(same, body)
    return answer.status, answer.headers["content-type"], answer.whole, body


@pytest.mark.parametrize("name", ASKS)
async def test_the_answer_is_the_engines_own(
    name: str, router: Router, engines: tuple[Engine, Engine], client: httpx.AsyncClient
) -> None:
    request: Ask = ASKS[name]
    for engine in engines:
        await ask(engine.port, request.path, request.body)  # from now on the prompt is cached wherever it goes
    given: set[tuple[int, str, bool, bytes]] = set()
    passed: set[tuple[int, str, bool, bytes]] = set()
    for attempt in range(ATTEMPTS):
        direct = await ask(engines[0].port, request.path, request.body)
        headers = {"x-request-id": f"{name}-{attempt}"}
        routed = await ask(router.port, request.path, request.body, headers)
        assert routed.whole
        assert routed.status == (200 if request in INFERENCE else 400)
        assert (await entry(router, f"{name}-{attempt}")).status == routed.status
        given.add(comparable(direct))
        passed.add(comparable(routed))
        if given & passed:
            return
    assert comparable(routed) == comparable(direct)
