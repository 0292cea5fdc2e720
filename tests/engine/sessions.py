"""Sessions whose home is known."""

from __future__ import annotations

import httpx

from tests.engine.asks import chat, user
from tests.engine.engine import Engine
from tests.engine.seen import entry
from tests.fakes.process import Router

MOST_TRIED = 100


async def sessions_at(engine: Engine, count: int, router: Router, client: httpx.AsyncClient) -> list[str]:
    """Ids of `count` sessions that have had their first turn on `engine`, for the header modal-session-id."""
    found: list[str] = []
    for number in range(MOST_TRIED):
        session = f"at-{engine.port}-{number}"
        headers = {"modal-session-id": session, "x-request-id": session}
        body = chat([user(f"I am {session}.")], 1, stream=False)
        answer = await client.post(f"{router.url}/v1/chat/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        if (await entry(router, session)).replica == engine.url:
            found.append(session)
        if len(found) == count:
            return found
    raise AssertionError(f"only {len(found)} of {MOST_TRIED} sessions were placed on {engine.url}")
