"""Clients that take their time: each is ended by a timeout that says so, and costs little meanwhile."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress

import pytest

from tests.fakes.client import RawClient, get, post
from tests.fakes.upstream import LAST_CHUNK, SSE_HEAD, Peer, RawRequest, chunk, ok
from tests.fakes.wire import Ended, eventually
from tests.hardening.attacked import CHUNKED, MIB, otherwise, proper
from tests.hardening.conftest import Attack

EACH = 30

DRIPS = {
    "target": (b"GET /", b"x", "header_timeout"),
    "header name": (b"GET / HTTP/1.1\r\nX-", b"x", "header_timeout"),
    "header value": (b"GET / HTTP/1.1\r\nX: ", b"x", "header_timeout"),
    "headers": (b"GET / HTTP/1.1\r\n", b"A: b\r\n", "header_timeout"),
    "body": (post(body=b"x" * 100_000)[:-100_000], b"x", "body_timeout"),
    "chunks": (CHUNKED, b"1\r\nx\r\n", "body_timeout"),
    "chunk size": (CHUNKED, b"0", "body_timeout"),
    "chunk extension": (CHUNKED + b"1;", b"x", "body_timeout"),
    "trailers": (CHUNKED + b"1\r\nx\r\n0\r\n", b"A: b\r\n", "body_timeout"),
}


async def drip(client: RawClient, start: bytes, piece: bytes) -> None:
    """A byte now and then, until the other end has had enough."""
    with suppress(Ended):
        client.send(start)
        while not client.ended:
            for each in range(len(piece)):
                client.send(piece[each : each + 1])
            await asyncio.sleep(0.1)


async def test_what_drips_without_end_is_ended_by_its_timeout(attacked: Attack) -> None:
    router = await attacked(proper, timeouts={"header_s": 1, "body_s": 1})
    kinds = [kind for kind in DRIPS.values() for _ in range(EACH)]
    clients = await router.clients(len(kinds))
    await asyncio.gather(*(drip(client, *kind[:2]) for client, kind in zip(clients, kinds, strict=True)))
    for client, (_, _, reason) in zip(clients, kinds, strict=True):
        answer = await client.answer()
        assert (answer.status, json.loads(answer.body)["error"]["code"]) == (408, reason)
    assert router.peak < 30 * MIB
    await router.unharmed()


async def test_empty_lines_are_no_request_and_keep_no_connection(attacked: Attack) -> None:
    router = await attacked(proper, timeouts={"keep_alive_s": 3})
    clients = await router.clients(EACH)
    await asyncio.gather(*(drip(client, b"", b"\r\n") for client in clients))
    assert not any(client.buffer for client in clients), "nobody asked, nobody is answered"
    await router.unharmed()


async def test_readers_that_never_read_are_cut_off(attacked: Attack) -> None:
    """Each has asked for a stream that never ends: what is buffered for it is bounded, then it is gone."""

    async def stream(peer: Peer, _: RawRequest) -> None:
        peer.send(SSE_HEAD)
        while True:
            peer.send(chunk(b"data: " + b"x" * 8_000 + b"\n\n"))
            await asyncio.sleep(0)
            await peer.drain()

    router = await attacked(otherwise(stream), timeouts={"stalled_client_s": 1})
    clients = await router.clients(50)
    for client in clients:
        client.stop_reading()
        client.send(post())
    await router.reached("warmroute_in_flight_requests", 50)
    await router.gauge("warmroute_in_flight_requests", 0)
    assert router.peak < 50 * MIB, "less than a megabyte each"
    await router.unharmed()


async def test_readers_that_rest_hold_up_only_themselves(attacked: Attack) -> None:
    """Their replica is held back meanwhile, and its answer is whole in the end."""
    size = 4 * MIB

    async def large(peer: Peer, _: RawRequest) -> None:
        peer.send(ok(b"x" * size))
        await peer.drain()

    router = await attacked(otherwise(large), timeouts={"stalled_client_s": 600})
    clients = await router.clients(20)
    for client in clients:
        client.stop_reading()
        client.send(post())
    await router.unharmed(20)
    assert router.peak < 60 * MIB, "not twenty answers at once"
    for client in clients:
        client.read_on()
    for client in clients:
        assert len((await client.answer()).body) == size


async def test_a_client_that_pipelined_much_and_broke_off_frees_its_replica(attacked: Attack) -> None:
    """Past some requests ahead it is not read from: its reset must be seen all the same."""
    asked: list[Peer] = []

    async def hang(peer: Peer, _: RawRequest) -> None:
        asked.append(peer)
        await peer.end()

    router = await attacked(otherwise(hang), timeouts={"first_byte_s": 600})
    for leave in (RawClient.reset, RawClient.close, RawClient.half_close):
        client = await router.client()
        client.send(get("/never") * 100)
        await eventually(lambda: asked, "the first request has arrived")
        await router.unharmed()
        leave(client)
        await asked.pop().end()
        await router.gauge("warmroute_in_flight_requests", 0)


async def test_a_stream_whose_replica_falls_silent_is_broken_off(attacked: Attack) -> None:
    async def begin(peer: Peer, _: RawRequest) -> None:
        peer.send(SSE_HEAD + chunk(b"data: 1\n\n"))
        await peer.end()

    router = await attacked(otherwise(begin), timeouts={"idle_s": 1})
    clients = await router.clients(100)
    for client in clients:
        client.send(post())
    for client in clients:
        with pytest.raises(Ended):
            await client.answer()
        assert LAST_CHUNK not in client.buffer
    await router.unharmed()
