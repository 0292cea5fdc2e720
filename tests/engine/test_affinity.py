"""A session stays where its KV cache is, by the word of the engine that holds it."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from tests.engine.conversation import assert_stayed, converse
from tests.engine.engine import LOGS, Engine
from tests.fakes.process import Router, start_router

pytestmark = pytest.mark.engine

SESSIONS = 16
"""All on one of two replicas by bad luck: 1 in 2**15."""
AT_ONCE = 4
"""No more than one engine's batch, so that no queue is ever full and none has to leave its home."""


async def test_every_turn_finds_the_one_before_it_in_the_cache(
    router: Router, engines: tuple[Engine, Engine], client: httpx.AsyncClient
) -> None:
    gate = asyncio.Semaphore(AT_ONCE)
    sessions = await asyncio.gather(*(converse(router, client, f"warm-{n}", gate) for n in range(SESSIONS)))
    for turns in sessions:
        assert_stayed(turns)
        for turn in turns:
            assert (turn.entry.prompt_tokens, turn.entry.cached_tokens) == (turn.prompt_tokens, turn.cached_tokens)
    assert {turns[0].entry.replica for turns in sessions} == {engine.url for engine in engines}


async def test_without_affinity_the_second_turn_finds_nothing(
    engines: tuple[Engine, Engine], client: httpx.AsyncClient
) -> None:
    urls = [engine.url for engine in engines]
    with start_router(urls, LOGS / "router-round_robin.log", "--policy", "round_robin") as router:
        turns = await converse(router, client, "cold", asyncio.Semaphore(1))
    assert turns[1].entry.replica != turns[0].entry.replica
    assert turns[1].cached_tokens == 0
