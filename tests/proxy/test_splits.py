"""However the network cuts the bytes, both ends get the same ones."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from tempfile import TemporaryDirectory

import h11
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from router.identity import DEFAULT_RULES, IdentityRules
from router.settings import PolicySettings, Settings
from tests.fakes.client import post
from tests.fakes.proxied import Proxied
from tests.fakes.upstream import LAST_CHUNK, Peer, RawRequest, ScriptedUpstream, chunk
from tests.fakes.wire import Wire

BODIES = st.lists(
    st.binary(min_size=1, max_size=40) | st.sampled_from([b"\r\n", b"0\r\n\r\n", b"x" * 5000]), max_size=6
)
FRAMINGS = st.sampled_from(["length", "chunked", "close"])
CUTS = st.sampled_from([1, 2, 3, 7, 20, 100, 10_000]) | st.integers(0, 2**32).map(lambda seed: -1 - seed)
"""Bytes of each piece; negative numbers seed a random sequence of sizes."""


async def cut(wire: Wire, data: bytes, how: int) -> None:
    """Write `data` in pieces."""
    if how > 0:
        await wire.drip(data, how)
        return
    sizes = random.Random(how)
    while data:
        size = sizes.choice([1, 2, 5, 30, 200, 2000])
        await wire.drip(data[:size], size)
        data = data[size:]


def framed(parts: list[bytes], framing: str, first: bytes) -> bytes:
    head = first + b"Content-Type: text/event-stream\r\n"
    if framing == "length":
        return head + b"Content-Length: %d\r\n\r\n" % sum(map(len, parts)) + b"".join(parts)
    if framing == "chunked":
        return head + b"Transfer-Encoding: chunked\r\n\r\n" + b"".join(map(chunk, parts)) + LAST_CHUNK
    return head + b"\r\n" + b"".join(parts)


def understood(raw: bytes, count: int) -> list[tuple[int, bytes]]:
    """Status and body of each answer, as h11 reads them off a client's connection."""
    found: list[tuple[int, bytes]] = []
    reader = h11.Connection(h11.CLIENT)
    reader.receive_data(raw)
    for _ in range(count):
        reader.send(h11.Request(method="GET", target="/", headers=[("Host", "a")]))
        reader.send(h11.EndOfMessage())
        status, body = 0, b""
        while not isinstance(event := reader.next_event(), h11.EndOfMessage):
            assert event not in (h11.NEED_DATA, h11.PAUSED), "the answer is not whole"
            if isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
        found.append((status, body))
        reader.start_next_cycle()
    assert reader.trailing_data == (b"", False)
    return found


async def exchange(turns: list[tuple[list[bytes], bool, list[bytes], str]], up: int, down: int) -> None:
    requests = b"".join(
        post("/v1/chat/completions", b"".join(body), chunks=body if in_chunks else None)
        for body, in_chunks, _, _ in turns
    )
    served = 0

    async def script(peer: Peer) -> None:
        nonlocal served
        while True:
            await peer.request()
            _, _, parts, framing = turns[served]
            served += 1
            await cut(peer, framed(parts, framing, b"HTTP/1.1 200 OK\r\n"), down)
            if framing == "close":
                return

    upstream = await ScriptedUpstream(script).start()
    with TemporaryDirectory() as directory:
        router = Proxied(
            Settings(policy=PolicySettings(name="round_robin")),
            IdentityRules(DEFAULT_RULES, b""),
            Path(directory) / "log",
            sweep_s=1,
        )
        try:
            await router.start([upstream.url])
            client = await router.client()
            await cut(client, requests, up)
            await router.ended("done/body", len(turns))
            answers: list[tuple[int, bytes]] = []
            while len(answers) < len(turns):
                try:
                    assert client.buffer, "to the parser, nothing would be the end"
                    answers = understood(bytes(client.buffer), len(turns))
                except AssertionError:
                    await asyncio.sleep(0.001)
        finally:
            await router.stop()
            await upstream.stop()
    received: list[RawRequest] = upstream.requests
    assert [request.body for request in received] == [b"".join(body) for body, _, _, _ in turns]
    assert answers == [(200, b"".join(parts)) for _, _, parts, _ in turns]


@settings(max_examples=80)
@given(turns=st.lists(st.tuples(BODIES, st.booleans(), BODIES, FRAMINGS), min_size=1, max_size=4), up=CUTS, down=CUTS)
def test_bytes_are_the_same_at_both_ends(
    turns: list[tuple[list[bytes], bool, list[bytes], str]], up: int, down: int
) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(exchange(turns, up, down))
