"""A conversation as an agent has it, and what the engine and the router said of each of its turns."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import httpx

from tests.engine.asks import chat, user
from tests.engine.engine import PAGE_TOKENS
from tests.engine.seen import Entry, entry
from tests.fakes.process import Router

TURNS = 4
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


def assert_stayed(turns: list[Turn]) -> None:
    """All of it went to one replica, and found there what the turn before had left."""
    assert turns[0].cached_tokens == 0
    for before, turn in pairwise(turns):
        # Whole pages are cached, and the last one may not be.
        assert before.prompt_tokens - 2 * PAGE_TOKENS < turn.cached_tokens < turn.prompt_tokens
    assert [turn.entry.reason for turn in turns] == ["new", *["home"] * (TURNS - 1)]
    assert len({turn.entry.replica for turn in turns}) == 1
