"""An engine that ends takes nothing with it that had not begun to be answered."""

from __future__ import annotations

import asyncio
import os
import signal
from itertools import count

import httpx
import pytest

from tests.engine.asks import chat, user
from tests.engine.engine import Engine, Load
from tests.engine.seen import ReplicaView, entry, replicas
from tests.engine.sessions import sessions_at
from tests.engine.wire import Answer, Exchange, ask
from tests.fakes.process import Router
from tests.fakes.waiting import until

pytestmark = pytest.mark.engine

CHAT = "/v1/chat/completions"
NOTICED_LIMIT_S = 60
"""Readiness is asked for about once a second; the limit is for a machine that is busy with other things."""
TURNS_LIMIT_S = 180
GRACE_S = 60
"""As Kubernetes gives, before it kills. A server that was told to end looks every 5 s whether a request is left; one
was once seen to hang in its own shutdown after that, for three minutes."""


def done(answer: Answer, tokens: int, *, stream: bool) -> bool:
    """Whether an answer came whole, with all its tokens."""
    counted = b'"completion_tokens":%d,' % tokens in answer.body
    ended = not stream or answer.body.endswith(b"data: [DONE]\n\n")
    return answer.status == 200 and answer.whole and counted and ended


def named(session: str, request_id: str) -> dict[str, str]:
    return {"modal-session-id": session, "x-request-id": request_id}


async def test_sigterm_loses_nothing(router: Router, engines: tuple[Engine, Engine], client: httpx.AsyncClient) -> None:
    leaving, staying = engines
    on_leaving = await sessions_at(leaving, 6, router, client)
    on_staying = await sessions_at(staying, 2, router, client)
    long_tokens = 1_500
    long = chat([user("Tell a long story.")], long_tokens, stream=True)
    streams = [await Exchange.begin(router.port, CHAT, long, named(s, f"long-{s}")) for s in on_leaving[:2]]
    for stream in streams:
        await stream.first_data()

    stopping = asyncio.Event()
    lost: list[Answer] = []
    turns = dict.fromkeys([*on_leaving[2:4], *on_staying], 0)

    async def keep_asking(session: str) -> None:
        for number in count():
            if stopping.is_set():
                return
            stream = number % 2 == 0
            body = chat([user(f"Short question {number} of {session}.")], 8, stream=stream)
            answer = await ask(router.port, CHAT, body, named(session, f"short-{session}-{number}"))
            turns[session] = number + 1
            if not done(answer, 8, stream=stream):
                lost.append(answer)

    async def each_has_had(more: int) -> None:
        """Wait for so many more turns in each session."""
        goal = {session: n + more for session, n in turns.items()}

        async def now() -> dict[str, int]:
            return dict(turns)

        await until(now, lambda seen: all(seen[s] >= n for s, n in goal.items()), TURNS_LIMIT_S, f"turns {goal}")

    async def views() -> dict[str, ReplicaView]:
        return await replicas(router, client)

    async with asyncio.TaskGroup() as traffic:
        for session in turns:
            traffic.create_task(keep_asking(session))
        try:
            await each_has_had(2)
            leaving.process.signal(signal.SIGTERM)
            await until(views, lambda v: v[leaving.url].state != "ready", NOTICED_LIMIT_S, "the router has noticed")
            for session in on_leaving[4:6]:
                body = chat([user("Where am I now?")], 8, stream=True)
                answer = await ask(router.port, CHAT, body, named(session, f"moved-{session}"))
                line = await entry(router, f"moved-{session}")
                assert done(answer, 8, stream=True)
                assert (line.replica, line.reason, line.tries) == (staying.url, "home_lost", 1)
            for stream in streams:
                assert done(await stream.finish(), long_tokens, stream=True)
            await asyncio.to_thread(leaving.process.stop, GRACE_S)
            await each_has_had(2)
        finally:
            stopping.set()
    assert lost == []
    for session in on_leaving[:2]:
        assert (await entry(router, f"long-{session}")).replica == leaving.url


@pytest.mark.parametrize("victim", ["scheduler", "server"])
async def test_a_killed_engine_breaks_only_what_had_begun(
    victim: str, router: Router, engines: tuple[Engine, Engine], client: httpx.AsyncClient
) -> None:
    dying, staying = engines
    sessions = await sessions_at(dying, 7, router, client)
    long_tokens, short_tokens = 1_000, 50
    streams: list[Exchange] = []
    for session in sessions[:2]:
        body = chat([user("Tell a long story.")], 3 * long_tokens, stream=True)
        streams.append(await Exchange.begin(router.port, CHAT, body, named(session, f"begun-{session}")))
        await streams[-1].first_data()
    # Two that run and two that wait for a place: none of these has been answered a byte when the engine dies.
    kinds = [(sessions[2], long_tokens, False), (sessions[3], long_tokens, False)]
    kinds += [(sessions[4], short_tokens, True), (sessions[5], short_tokens, False)]
    waiting = []
    for place, (session, tokens, stream) in enumerate(kinds):
        body = chat([user("Tell me about it.")], tokens, stream=stream)
        waiting.append(asyncio.create_task(ask(router.port, CHAT, body, named(session, f"waiting-{session}"))))
        await dying.wait_load(client, Load(min(3 + place, 4), max(0, place - 1)))

    os.kill(dying.scheduler_pid() if victim == "scheduler" else dying.process.pid, signal.SIGKILL)

    for exchange in streams:
        answer = await exchange.finish()
        assert answer.status == 200
        assert not answer.whole
        assert b"[DONE]" not in answer.body
    for task, (session, tokens, stream) in zip(waiting, kinds, strict=True):
        answer = await task
        assert done(answer, tokens, stream=stream)
        line = await entry(router, f"waiting-{session}")
        assert (line.replica, line.tries) == (staying.url, 2)
        # A kept connection that ends without an answer is replaced once, and then nothing listens any more.
        assert line.failed in ("reset", "connect")
    body = chat([user("Still there?")], 8, stream=False)
    after = await ask(router.port, CHAT, body, named(sessions[6], "after"))
    assert done(after, 8, stream=False)
    assert (await entry(router, "after")).replica == staying.url
    await asyncio.to_thread(dying.process.stop, GRACE_S)
