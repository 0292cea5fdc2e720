"""A session stays where its KV cache is, by the word of the engine that holds it."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import httpx
import pytest

from tests.engine.asks import chat, user
from tests.engine.engine import LOGS, PAGE_TOKENS, Engine
from tests.engine.seen import Entry, entry
from tests.fakes.process import Router, start_router

pytestmark = pytest.mark.engine

SESSIONS = 16
"""All on one of two replicas by bad luck: 1 in 2**15."""
TURNS = 4
AT_ONCE = 4
"""No more than one engine's batch, so that no queue is ever full and none has to leave its home."""
WORDS = Path(__file__).read_text().split()


@dataclass(frozen=True)
class Turn:
    """What one turn's answer reported, and the router's log line of it."""

    prompt_tokens: int
    cached_tokens: int
    entry: Entry


async def converse(router: Router, client: httpx.AsyncClient, session: str, gate: asyncio.Semaphore) -> list[Turn]:
    """A conversation that grows by a question and an answer a turn; every other turn is streamed."""
    lots = random.Random(session)
    messages: list[dict[str, str]] = []
    turns: list[Turn] = []
    for number in range(TURNS):
        messages.append(user(" ".join([session, *lots.choices(WORDS, k=50)])))
        stream = number % 2 == 1
        headers = {"modal-session-id": session, "x-request-id": f"{session}-{number}"}
        async with gate:
            url = f"{router.url}/v1/chat/completions"
            answer = await client.post(url, json=chat(messages, 8, stream=stream), headers=headers)
        assert answer.status_code == 200, answer.text
        if stream:
            events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
            text = "".join(choice["delta"].get("content") or "" for e in events for choice in e["choices"])
            usage = next(event["usage"] for event in events if event.get("usage"))
        else:
            text = answer.json()["choices"][0]["message"]["content"]
            usage = answer.json()["usage"]
        messages.append({"role": "assistant", "content": text})
        line = await entry(router, f"{session}-{number}")
        turns.append(Turn(usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"], line))
    return turns


async def test_every_turn_finds_the_one_before_it_in_the_cache(
    router: Router, engines: tuple[Engine, Engine], client: httpx.AsyncClient
) -> None:
    gate = asyncio.Semaphore(AT_ONCE)
    sessions = await asyncio.gather(*(converse(router, client, f"warm-{n}", gate) for n in range(SESSIONS)))
    for turns in sessions:
        assert turns[0].cached_tokens == 0
        for before, turn in pairwise(turns):
            # Whole pages are cached, and the last one may not be.
            assert before.prompt_tokens - 2 * PAGE_TOKENS < turn.cached_tokens < turn.prompt_tokens
        assert [turn.entry.reason for turn in turns] == ["new", *["home"] * (TURNS - 1)]
        assert len({turn.entry.replica for turn in turns}) == 1
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
