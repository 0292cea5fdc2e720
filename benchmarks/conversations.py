"""A client that has whole conversations over HTTP: what was said grows, and answers come back in it word by word.

Sessions are those of `sim.workload`, whose prompts are sizes and names of KV pages. Here they become bytes of which the
emulated replica (`sim.emulator.tokens`: four bytes are a token) counts just as many, and which agree as far as the
pages do.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import httpx
import msgspec

from sim.emulator.tokens import UNIT
from sim.workload import Turn

SESSION_HEADER = "x-session-affinity"
_HEADERS = {"content-type": "application/json"}
_AROUND = 2
"""Tokens around a message's text: its role, and its end."""
_BEHIND = 2
"""Tokens behind the last message's text: its end, and the role of the answer to come."""
_OPENING = b'{"role":"user","content":"'


@dataclass(frozen=True, slots=True)
class Session:
    """A linear one, with every answer kept in the history."""

    name: str
    """Sent as its affinity key."""
    start_s: float
    """When it begins, wall-clock seconds after all of them do."""
    turns: Sequence[Turn]
    """Gaps in wall-clock seconds."""


@dataclass(slots=True)
class Answered:
    """A request as its client saw it. Seconds of a monotonic clock."""

    session: str
    turn: int
    sent: float
    replica: str = ""
    first_token: float = 0.0
    ended: float = 0.0
    prompt_tokens: int = 0
    """As the replica counted them."""
    cached_tokens: int = 0


class _Details(msgspec.Struct):
    cached_tokens: int


class _Usage(msgspec.Struct):
    prompt_tokens: int
    prompt_tokens_details: _Details


class _Delta(msgspec.Struct):
    content: str = ""


class _Choice(msgspec.Struct):
    delta: _Delta


class _Chunk(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage | None = None


_decode = msgspec.json.Decoder(_Chunk).decode


async def play(url: str, sessions: Sequence[Session], system_tokens: int) -> list[Answered]:
    """All of them, each at its time and pace, in order of their requests.

    The first `system_tokens` of all prompts are the same. Raises a group of errors: httpx.HTTPStatusError for an answer
    other than 200, ValueError for a session that cannot be said in messages.
    """
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits, trust_env=False) as client:
        begin = time.monotonic()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_have(client, each, system_tokens, begin)) for each in sessions]
    return sorted((answered for task in tasks for answered in task.result()), key=lambda each: each.sent)


async def _have(client: httpx.AsyncClient, session: Session, system_tokens: int, begin: float) -> list[Answered]:
    words = Random(session.name)
    system = _text(Random("system"), system_tokens - _AROUND - 1)  # the user's role is common as well
    said = [b'{"role":"system","content":"', system, b'"},', _OPENING]
    rest = session.turns[0].prompt_tokens - system_tokens - _BEHIND
    answers = []
    await asyncio.sleep(begin + session.start_s - time.monotonic())
    for number, turn in enumerate(session.turns):
        if rest < 1:
            raise ValueError(f"session {session.name}, turn {number} adds too little: its text has {rest} tokens")
        await asyncio.sleep(turn.gap_s)
        said.append(_text(words, rest))
        answered, answer = await _ask(client, session, number, said, turn.output_tokens)
        answers.append(answered)
        if number + 1 < len(session.turns):
            said += [b'"},{"role":"assistant","content":"', answer.encode(), b'"},', _OPENING]
            before = turn.prompt_tokens + turn.output_tokens + _AROUND  # the answer's end and the user's role
            rest = session.turns[number + 1].prompt_tokens - before - _BEHIND
    return answers


def _text(words: Random, tokens: int) -> bytes:
    """So many tokens, each of four hexadecimal digits."""
    return words.randbytes(tokens * UNIT // 2).hex().encode()


async def _ask(
    client: httpx.AsyncClient, session: Session, number: int, said: Sequence[bytes], output_tokens: int
) -> tuple[Answered, str]:
    head = b'{"model":"emulated","stream":true,"stream_options":{"include_usage":true},"ignore_eos":true,"messages":['
    body = b"".join((head, *said, b'"}],"max_tokens":%d}' % output_tokens))  # last, so that bodies begin alike
    answered = Answered(session.name, number, time.monotonic())
    answer = []
    headers = {**_HEADERS, SESSION_HEADER: session.name}
    async with client.stream("POST", "/v1/chat/completions", content=body, headers=headers) as response:
        if response.is_error:
            await response.aread()
        response.raise_for_status()
        answered.replica = response.headers["x-warmroute-replica"]
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            answered.first_token = answered.first_token or time.monotonic()
            chunk = _decode(line[len("data: ") :])
            answer += [choice.delta.content for choice in chunk.choices]
            if chunk.usage is not None:
                answered.prompt_tokens = chunk.usage.prompt_tokens
                answered.cached_tokens = chunk.usage.prompt_tokens_details.cached_tokens
    answered.ended = time.monotonic()
    return answered, "".join(answer)
