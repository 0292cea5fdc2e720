"""Streams: every chunk at once and as it is, and never more held than a bound."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable

import pytest

from tests.fakes.client import get, post
from tests.fakes.proxied import Proxied
from tests.fakes.upstream import LAST_CHUNK, SSE_HEAD, Peer, chunk, chunked_head, ok
from tests.fakes.wire import eventually
from tests.proxy.conftest import Warm

EVENT = b'data: {"id":"1","choices":[{"delta":{"content":"token"}}]}\n\n'
MAX_STALLED = 24 << 20
"""What a stalled stream may hold in all: kernel buffers on both sides of the router (Linux lets each grow to 4 to 6 MB)
and the router's own."""


class LockStep:
    """A replica that writes a piece only when the client has acknowledged the one before."""

    def __init__(self, *pieces: bytes) -> None:
        self._pieces = pieces
        self._acknowledged = asyncio.Semaphore(0)

    def acknowledge(self) -> None:
        self._acknowledged.release()

    async def __call__(self, peer: Peer) -> None:
        while True:
            await peer.request()
            for piece in self._pieces:
                peer.send(piece)
                await self._acknowledged.acquire()


async def test_each_chunk_arrives_before_the_next_is_written(warm: Warm) -> None:
    events = [EVENT.replace(b"token", b"token %d" % n) for n in range(50)]
    script = LockStep(SSE_HEAD, *map(chunk, events), LAST_CHUNK)
    router = await warm(script)
    client = await router.client()
    for _ in range(2):
        client.send(post())
        # An event stream's head waits for its first event, which may say that the queue is full.
        script.acknowledge()
        assert (await client.head()).status == 200
        for event in events:
            assert await client.chunk() == event
            script.acknowledge()
        assert await client.up_to(b"\r\n\r\n") == LAST_CHUNK
        script.acknowledge()
    assert len(router.upstreams[0].connections) == 1


async def test_a_stream_of_another_type_is_begun_with_its_head(warm: Warm) -> None:
    script = LockStep(chunked_head("Content-Type: application/x-ndjson"), chunk(b"{}\n"), LAST_CHUNK)
    router = await warm(script)
    client = await router.client()
    client.send(post())
    assert (await client.head()).header("content-type") == "application/x-ndjson"
    script.acknowledge()
    assert await client.chunk() == b"{}\n"
    script.acknowledge()
    assert await client.chunk() == b""
    script.acknowledge()


@pytest.mark.parametrize(
    "events",
    [
        [b": comment\n\n", EVENT],
        [b"data: [DONE]\n\n"],
        [b"event: message_start\ndata: {}\n\n", b"event: ping\ndata: {}\n\n"],
        [b"d", b"ata: {}", b"\n\n"],
        [b"\n", b"\r\n", b"x" * 100_000],
    ],
)
async def test_no_event_waits_for_another(warm: Warm, events: list[bytes]) -> None:
    script = LockStep(SSE_HEAD + chunk(events[0] + b"data: x\n\n"), *map(chunk, events), LAST_CHUNK)
    router = await warm(script)
    client = await router.client()
    client.send(post())
    assert (await client.head()).status == 200
    assert await client.chunk() == events[0] + b"data: x\n\n"
    script.acknowledge()
    for event in events:
        got = b""
        while len(got) < len(event):
            got += await client.chunk()
        assert got == event
        script.acknowledge()
    assert await client.chunk() == b""
    script.acknowledge()


async def test_a_length_delimited_answer_is_passed_on_piece_by_piece(warm: Warm) -> None:
    script = LockStep(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n", b"hello", b"wor", b"ld")
    router = await warm(script)
    client = await router.client()
    client.send(get())
    await client.head()
    for piece in (b"hello", b"wor", b"ld"):
        script.acknowledge()
        assert await client.exactly(len(piece)) == piece
    script.acknowledge()


async def test_two_chunks_in_one_read_stay_two(warm: Warm) -> None:
    pieces = [chunk(EVENT), chunk(EVENT) * 2, chunk(b"a") + chunk(b"b") + chunk(EVENT), chunk(EVENT)]
    script = LockStep(SSE_HEAD + chunk(EVENT) * 2, *pieces, LAST_CHUNK)
    router = await warm(script)
    client = await router.client()
    client.send(post())
    await client.head()
    assert [await client.chunk() for _ in range(2)] == [EVENT] * 2
    for expected in ([EVENT], [EVENT, EVENT], [b"a", b"b", EVENT], [EVENT], [b""]):
        script.acknowledge()
        assert [await client.chunk() for _ in expected] == expected
    script.acknowledge()


async def test_a_chunk_in_two_reads_arrives_as_it_comes(warm: Warm) -> None:
    """Neither held back until it is whole, nor garbled: also where the cut is in the size line or the ending."""
    whole = chunk(EVENT)
    for cut in [1, 2, 3, 4, 5, len(whole) - 3, len(whole) - 2, len(whole) - 1]:
        script = LockStep(SSE_HEAD + whole, whole, whole[:cut], whole[cut:] + whole, whole, LAST_CHUNK)
        router = await warm(script)
        client = await router.client()
        client.send(post())
        await client.head()
        assert await client.chunk() == EVENT
        script.acknowledge()
        assert await client.chunk() == EVENT
        script.acknowledge()
        if cut > 4:
            first = await client.chunk()
            assert first == whole[4:cut][: len(EVENT)]
        else:
            first = b""
        script.acknowledge()
        rest = b""
        while len(first + rest) < 2 * len(EVENT):
            rest += await client.chunk()
        assert first + rest == EVENT * 2
        script.acknowledge()
        assert await client.chunk() == EVENT
        script.acknowledge()
        assert await client.chunk() == b""
        script.acknowledge()


@pytest.mark.parametrize(
    "reads",
    [
        [b"16\r\n", b"5\r\nhello\r\n", b"x" * 12 + b"\r\n"],
        [chunk(EVENT) + b"1", b"5\r\nhello\r\n", b"x" * 14 + b"\r\n"],
        [chunk(EVENT) + b"1", b"5", b"\r\nhello", b"\r\n" + b"x" * 14, b"\r", b"\n"],
        [b"c\r\nab", b"5\r\nhello\r\n", b"\r\n"],
    ],
)
async def test_a_read_that_looks_like_a_chunk_is_not_taken_for_one_inside_another(
    warm: Warm, reads: list[bytes]
) -> None:
    async def script(peer: Peer) -> None:
        while True:
            await peer.request()
            await peer.drip(SSE_HEAD + chunk(EVENT), 1000)
            for read in [chunk(EVENT), *reads, chunk(EVENT)]:
                await peer.drip(read, 1000)
            await peer.drip(LAST_CHUNK)

    router = await warm(script)
    client = await router.client()
    for _ in range(2):
        inner = b"".join(reads)
        begun = inner.startswith(chunk(EVENT))
        payload = inner.removeprefix(chunk(EVENT)).split(b"\r\n", 1)[1][:-2]
        answer = await client.ask(post())
        assert answer.body == EVENT * (3 if begun else 2) + payload + EVENT


async def test_the_end_in_the_same_read_as_the_last_chunk(warm: Warm) -> None:
    script = LockStep(SSE_HEAD + chunk(EVENT), chunk(EVENT), chunk(EVENT) + LAST_CHUNK)
    router = await warm(script)
    client = await router.client()
    for _ in range(2):
        client.send(post())
        await client.head()
        for _ in range(3):
            assert await client.chunk() == EVENT
            script.acknowledge()
        assert await client.chunk() == b""
        assert await client.up_to(b"\r\n") == b"\r\n"
    assert len(router.upstreams[0].connections) == 1


async def test_a_chunk_that_looks_like_the_end_is_not(warm: Warm) -> None:
    tricky = [LAST_CHUNK, b"\r\n0\r\n\r\n", chunk(EVENT), b"\r\n", b"5\r\nhello\r\n", b"HTTP/1.1 200 OK\r\n\r\n"]
    script = LockStep(SSE_HEAD + chunk(EVENT), *map(chunk, tricky), LAST_CHUNK)
    router = await warm(script)
    client = await router.client()
    client.send(post())
    await client.head()
    assert await client.chunk() == EVENT
    for payload in tricky:
        script.acknowledge()
        assert await client.chunk() == payload
    script.acknowledge()
    assert await client.chunk() == b""
    script.acknowledge()


async def test_sizes_written_otherwise_mean_the_same(warm: Warm) -> None:
    script = LockStep(
        SSE_HEAD + chunk(EVENT),
        b"00000a\r\n0123456789\r\n",
        b"A;x=y\r\n0123456789\r\n",
        b"0a\r\n0123456789\r\n",
        b"000\r\n\r\n",
    )
    router = await warm(script)
    client = await router.client()
    client.send(post())
    await client.head()
    assert await client.chunk() == EVENT
    for _ in range(3):
        script.acknowledge()
        assert await client.chunk() == b"0123456789"
    script.acknowledge()
    assert await client.chunk() == b""
    script.acknowledge()


async def test_usage_is_read_from_the_tail_of_a_stream(warm: Warm) -> None:
    usage = (
        b'data: {"choices":[],"usage":{"prompt_tokens":1200,"completion_tokens":7,'
        b'"prompt_tokens_details":{"cached_tokens":1100}}}\n\n'
    )
    script = LockStep(
        SSE_HEAD + chunk(EVENT), *[chunk(EVENT)] * 20, chunk(usage), chunk(b"data: [DONE]\n\n"), LAST_CHUNK
    )
    router = await warm(script)
    client = await router.client()
    client.send(post())
    for _ in range(24):
        script.acknowledge()
    await client.answer()
    (line,) = await router.lines()
    assert (line["prompt_tokens"], line["cached_tokens"], line["completion_tokens"]) == (1200, 1100, 7)
    tally = router.metrics.replicas["a"]
    assert (tally.prompt_tokens, tally.cached_tokens, tally.completion_tokens) == (1200, 1100, 7)


async def test_bytes_sent_are_counted_whole(warm: Warm) -> None:
    script = LockStep(SSE_HEAD + chunk(EVENT), chunk(EVENT), chunk(EVENT), chunk(EVENT) * 2, LAST_CHUNK)
    router = await warm(script)
    client = await router.client()
    client.send(post(body=b"x" * 321))
    await client.head()
    for count in (1, 1, 1, 2, 1):
        for _ in range(count):
            await client.chunk()
        script.acknowledge()
    (line,) = await router.lines()
    assert (line["bytes_in"], line["bytes_out"]) == (321, client.received)


# Back-pressure

TOTAL = 200 << 20
PIECE = bytes(range(256)) * 256


class Gusher:
    """A replica that writes 200 MB as fast as they are taken."""

    def __init__(self, head: bytes, frame: Callable[[bytes], bytes], end: bytes) -> None:
        self._head = head
        self._piece = frame(PIECE)
        self._end = end
        self.written = 0

    async def __call__(self, peer: Peer) -> None:
        await peer.request()
        peer.send(self._head)
        for _ in range(TOTAL // len(PIECE)):
            peer.send(self._piece)
            await peer.drain()
            self.written += len(PIECE)
        peer.send(self._end)
        await peer.drain()


def chunks() -> Gusher:
    return Gusher(SSE_HEAD, chunk, LAST_CHUNK)


def length() -> Gusher:
    return Gusher(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % TOTAL, bytes, b"")


def until_close() -> Gusher:
    return Gusher(b"HTTP/1.1 200 OK\r\n\r\n", bytes, b"")


async def stalled(router: Proxied, gusher: Gusher) -> None:
    """Wait until the stream has come to a stand."""
    peer = await router.upstreams[0].connection()
    (downstream,) = router.proxy.downstreams

    def stands() -> bool:
        return peer.full and downstream.paused_since is not None

    await eventually(stands, "the stream stalls")
    written = -1
    while written != gusher.written:
        written = gusher.written
        await asyncio.sleep(0.1)
    assert stands()


@pytest.mark.parametrize("make", [chunks, length, until_close])
async def test_a_client_that_stops_reading_stops_the_replica(warm: Warm, make: Callable[[], Gusher]) -> None:
    gusher = make()
    router = await warm(gusher)
    client = await router.client()
    client.send(post())
    assert (await client.head()).status == 200
    client.stop_reading()
    await stalled(router, gusher)
    (downstream,) = router.proxy.downstreams
    assert gusher.written < MAX_STALLED
    assert downstream.transport.get_write_buffer_size() < 1 << 20, "what the router itself holds"
    # What was held back arrives whole once it reads on.
    client.read_on()
    got = hashlib.sha256()
    size = 0
    if make is length:
        while size < TOTAL:
            data = await client.some()
            size += len(data)
            got.update(data)
    else:
        while data := await client.chunk():
            size += len(data)
            got.update(data)
    wanted = hashlib.sha256()
    for _ in range(TOTAL // len(PIECE)):
        wanted.update(PIECE)
    assert size == TOTAL
    assert got.digest() == wanted.digest()
    await router.ended("done/body")


async def test_a_client_that_stops_and_goes_gets_everything(warm: Warm) -> None:
    router = await warm(chunks())
    client = await router.client()
    client.send(post())
    await client.head()
    (downstream,) = router.proxy.downstreams
    size = 0
    while data := await client.chunk():
        size += len(data)
        if size % (20 << 20) == 0:
            client.stop_reading()
            await eventually(lambda: downstream.paused_since is not None or router.outcomes())
            client.read_on()
    assert size == TOTAL


async def test_the_stall_of_one_stream_does_not_hold_up_another(warm: Warm) -> None:
    gusher = chunks()

    async def script(peer: Peer) -> None:
        if len(router.upstreams[0].connections) == 1:
            await gusher(peer)
        else:
            await peer.request()
            peer.send(ok(b"quick"))
            await peer.end()

    router = await warm(script)
    client = await router.client()
    client.send(post())
    await client.head()
    client.stop_reading()
    await stalled(router, gusher)
    other = await router.client()
    assert (await other.ask(get())).body == b"quick"


async def test_a_body_is_not_held_while_its_answer_streams(warm: Warm) -> None:
    script = LockStep(SSE_HEAD + chunk(EVENT), chunk(EVENT), LAST_CHUNK)
    router = await warm(script)
    client = await router.client()
    client.send(post(body=b"x" * 400_000))
    await client.head()
    assert await client.chunk() == EVENT
    assert router.proxy.body_bytes == 0
    for _ in range(3):
        script.acknowledge()
    await client.chunk()


async def test_many_streams_at_once_are_each_their_own(warm: Warm) -> None:
    async def script(peer: Peer) -> None:
        while True:
            request = await peer.request()
            peer.send(SSE_HEAD)
            for n in range(20):
                peer.send(chunk(b"data: %b %d\n\n" % (request.body, n)))
                await asyncio.sleep(0)
            peer.send(LAST_CHUNK)

    router = await warm(script, script)

    async def stream(name: bytes) -> None:
        client = await router.client()
        for _ in range(2):
            answer = await client.ask(post(body=name))
            assert answer.body == b"".join(b"data: %b %d\n\n" % (name, n) for n in range(20))

    await asyncio.gather(*(stream(b"stream-%d" % n) for n in range(100)))
    assert router.outcomes() == {"done/body": 200}
