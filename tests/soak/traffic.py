"""Clients of every sort, and each answer checked byte by byte: the emulated replicas' words follow from the prompt."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from random import Random
from typing import Any

from sim.emulator import tokens
from tests.fakes.client import Answer, RawClient, get, post
from tests.fakes.wire import Ended
from tests.soak.ledger import Ledger

CHAT = "/v1/chat/completions"
REFUSALS = {
    "all_ejected",
    "all_draining",
    "all_failed",
    "tries_exhausted",
    "retry_budget",
    "queue_full",
    "upstream_closed",
    "upstream_invalid",
    "first_byte_timeout",
}
"""What a router may answer by itself when replicas fail; each must have a fault to show for it."""
WRONG = [
    (post(CHAT, b"{no json"), 400, None),
    (post(CHAT, b'{"messages":[]}'), 400, None),
    (get("/nothing/here"), 404, None),
    (get("/flush_cache"), 403, "admin_path"),
    (get("/v1/models", "X-Big: " + "x" * 70_000), 431, "headers_too_large"),
    (b"GET /v1/models HTTP/1.1\r\n\r\n", 400, "host"),
    (b"NONSENSE\r\n\r\n", 400, "malformed"),
    (post(CHAT, b"x", "Transfer-Encoding: chunked"), 400, "malformed"),
]
"""Requests of faulty clients, and what they are told."""


class Session:
    """One agent's conversation: turns that grow, forks of it, and a client that may leave or be slow."""

    def __init__(self, ledger: Ledger, port: int, rng: Random, name: str) -> None:
        self._ledger = ledger
        self._port = port
        self._rng = rng
        self._name = name
        self._messages: list[dict[str, str]] = [{"role": "system", "content": f"You are {name}. " + "word " * 200}]
        self._client: RawClient | None = None

    async def run(self, turns: int) -> None:
        """Some turns, each after a little thought."""
        rng = self._rng
        try:
            for turn in range(turns):
                await asyncio.sleep(rng.uniform(0, 0.6))
                self._messages.append({"role": "user", "content": f"turn {turn} of {self._name}: " + "please " * 30})
                how = rng.random()
                if how < 0.12:
                    await asyncio.gather(*(self._fork(n) for n in range(rng.choice((2, 4)))))
                elif how < 0.17:
                    await self._aside(large=True)
                text = await self._turn()
                if text is None:
                    self._messages.pop()
                else:
                    self._messages.append({"role": "assistant", "content": text})
        finally:
            await self._hang_up()

    async def _turn(self) -> str | None:
        """One request of the main conversation; its text, if it was answered whole."""
        how = self._rng.random()
        client = await self._connected()
        leave = slow = False
        if how < 0.10:
            leave = True
        elif how < 0.16:
            slow = True
        text = await self._ask(client, self._messages, stream=how < 0.8, leave=leave, slow=slow)
        if text is None:
            await self._hang_up()
        return text

    async def _fork(self, number: int) -> None:
        messages = [*self._messages, {"role": "user", "content": f"fork {number}"}]
        client = await RawClient.connect(self._port)
        try:
            await self._ask(client, messages, stream=True)
        finally:
            client.transport.abort()

    async def _aside(self, *, large: bool) -> None:
        messages = [{"role": "user", "content": "x" * self._rng.choice((500_000, 900_000))}]
        client = await RawClient.connect(self._port)
        try:
            await self._ask(client, messages, stream=False)
        finally:
            client.transport.abort()

    async def _connected(self) -> RawClient:
        client = self._client
        if client is None or client.ended or client.transport.is_closing():
            self._client = client = await RawClient.connect(self._port)
        return client

    async def _hang_up(self) -> None:
        if self._client is not None:
            self._client.transport.abort()
            self._client = None

    async def _ask(
        self,
        client: RawClient,
        messages: list[dict[str, str]],
        *,
        stream: bool,
        leave: bool = False,
        slow: bool = False,
    ) -> str | None:
        ledger, rng = self._ledger, self._rng
        count = rng.choice((5, 20, 40, 80)) if not slow else 600
        body = {"model": "emulated", "messages": messages, "stream": stream, "max_tokens": count, "ignore_eos": True}
        fresh = client.received == 0
        began = ledger.now()
        replica: str | None = None
        ledger.outstanding += 1
        ledger.counts["requests"] += 1
        try:
            client.send(post(CHAT, json.dumps(body).encode(), f"X-Session-Affinity: {self._name}"))
            head = await client.head()
            replica = head.header("x-warmroute-replica")
            if replica is None:
                await _body(client, head)
                self._refused(head, began)
                return None
            if head.status != 200:
                await _body(client, head)
                self._judge(f"status {head.status}", replica, began)
                return None
            if leave and stream:
                with suppress(Ended):
                    for _ in range(rng.choice((0, 1, 5))):
                        await client.chunk()
                rng.choice((client.reset, client.close, client.transport.abort))()
                ledger.counts["left"] += 1
                return None
            if slow:
                client.stop_reading()
                await asyncio.sleep(rng.uniform(0.5, 2.0))
                client.read_on()
            raw = await _body(client, head)
        except Ended as ended:
            if replica is None and not fresh and not ended.got:
                # A kept connection that the router closed just as it was used: HTTP's own race.
                ledger.counts["raced"] += 1
            else:
                self._judge(f"broken off ({ended.how})", replica, began)
            return None
        finally:
            ledger.outstanding -= 1
        expected = "".join(tokens.answer(tokens.conversation((m["role"], m["content"]) for m in messages), count))
        said, ended_well = _streamed(raw) if stream else _whole(raw)
        if said == expected and ended_well:
            ledger.counts["streams" if stream else "answers"] += 1
            return said
        if ended_well is None and expected.startswith(said):
            self._judge("an error within the stream", replica, began)  # a replica that said so itself
            return None
        ledger.violate(f"a wrong answer of {replica}: {said[-80:]!r} for {expected[-80:]!r}")
        return None

    def _refused(self, head: Answer, began: float) -> None:
        reason = head.header("x-warmroute-reason")
        if reason in REFUSALS and self._ledger.explained(None, began):
            self._ledger.counts["refused"] += 1
        else:
            self._ledger.violate(f"refused with {head.status} {reason}, and no replica failed")

    def _judge(self, what: str, replica: str | None, began: float) -> None:
        if self._ledger.explained(replica, began):
            self._ledger.counts["broken" if "broken" in what else "failed"] += 1
        else:
            self._ledger.violate(f"{what} by {replica}, asked at {began:.1f} s, and it had no fault")


async def faulty(ledger: Ledger, port: int, rng: Random) -> None:
    """One request of a client that does it wrong."""
    request, status, reason = rng.choice(WRONG)
    client = await RawClient.connect(port)
    began = ledger.now()
    try:
        answer = await client.ask(request)
        if reason is None and answer.status != status and ledger.explained(None, began):
            return
        if answer.status != status or (reason and answer.header("x-warmroute-reason") != reason):
            ledger.violate(f"{request[:60]!r} was answered {answer.status} {answer.header('x-warmroute-reason')}")
        ledger.counts["faulty"] += 1
    except Ended as ended:
        if not ledger.explained(None, began):
            ledger.violate(f"{request[:60]!r} was broken off: {ended}")
    finally:
        client.transport.abort()


async def _body(client: RawClient, head: Answer) -> bytes:
    if head.header("transfer-encoding") is None:
        return await client.exactly(int(head.header("content-length") or 0))
    parts = []
    while data := await client.chunk():
        parts.append(data)
    await client.up_to(b"\r\n")
    return b"".join(parts)


def _streamed(raw: bytes) -> tuple[str, bool | None]:
    """The text of an event stream, and whether it says that it is complete: None when it says that it failed."""
    text = ""
    done: bool | None = False
    for event in raw.split(b"\n\n"):
        data = event.removeprefix(b"data: ")
        if data == b"[DONE]":
            done = True if done is False else None
        elif data:
            said: dict[str, Any] = json.loads(data)
            if "error" in said:
                done = None
            for choice in said.get("choices", ()):
                text += choice["delta"].get("content") or ""
                if choice.get("finish_reason") == "abort":
                    done = None
    return text, done


def _whole(raw: bytes) -> tuple[str, bool | None]:
    said = json.loads(raw)
    choice = said["choices"][0]
    return choice["message"]["content"], None if choice["finish_reason"] == "abort" else True
