"""Too much of everything that a client may send: each flood ends in an error that names it, or in nothing at all."""

from __future__ import annotations

import asyncio
import resource
from contextlib import suppress

import pytest

from tests.fakes.client import RawClient, get, post
from tests.fakes.wire import Ended
from tests.hardening.attacked import CHUNKED, MIB, proper, silent
from tests.hardening.conftest import Attack


async def poured(client: RawClient, start: bytes, block: bytes, most: int) -> int:
    """Send `block` after `start` until the router ends it, or `most` bytes are sent; how many were."""
    sent = 0
    with suppress(Ended):
        client.send(start)
        while sent < most and not client.ended:
            client.send(block)
            sent += len(block)
            await asyncio.sleep(0)
            await client.drain()
    return sent


async def test_connections_beyond_the_limit_are_refused_and_those_there_are_served(attacked: Attack) -> None:
    router = await attacked(proper, limits={"connections": 60})
    router.newcomer = False  # it would need a place, too
    kept = await router.clients(50)
    for client in kept:
        assert (await client.ask(get())).status == 200
    for turn in range(4):
        flood = await router.clients(200)
        await router.refused("connections", 185 * (turn + 1))
        for client in flood:
            client.reset()
        await router.unharmed()
        for client in kept:
            assert (await client.ask(get())).status == 200
        await router.gauge("warmroute_connections", 51)
    answers = [client for client in flood if client.buffer]
    assert all(b"x-warmroute-reason: connections" in client.buffer for client in answers)
    assert router.peak < 20 * MIB


async def test_ten_thousand_idle_connections_cost_a_few_kilobytes_each(attacked: Attack) -> None:
    """As many as the limit of open files allows: each takes one here and one there."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        allowed = (hard - 200) // 2 if hard != resource.RLIM_INFINITY else 10_000
        count = min(10_000, allowed)
        if count < 1_000:
            pytest.skip(f"only {hard} open files are allowed")
        router = await attacked(proper, limits={"connections": 16_000})
        clients = await router.clients(count)
        for client in clients[::100]:
            assert (await client.ask(get())).status == 200
        await router.reached("warmroute_connections", count)
        await router.unharmed(20)
        assert router.grown < count * 16_384, f"{router.grown / count:.0f} bytes each"
        for client in clients[::100]:
            assert (await client.ask(get())).status == 200
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


BOMBS = {
    "one header of 100 MB": (b"GET / HTTP/1.1\r\nHost: a\r\nX: ", b"x" * 65_536, "headers_too_large"),
    "a name of 100 MB": (b"GET / HTTP/1.1\r\nHost: a\r\n", b"x" * 65_536, "headers_too_large"),
    "a target of 100 MB": (b"GET /", b"x" * 65_536, "headers_too_large"),
    "many headers": (b"GET / HTTP/1.1\r\nHost: a\r\n", b"X: y\r\n" * 10_000, "headers_too_large"),
    "empty headers": (b"GET / HTTP/1.1\r\nHost: a\r\n", b"X:\r\n" * 10_000, "headers_too_large"),
    "many hosts": (b"GET / HTTP/1.1\r\n", b"Host: a\r\n" * 10_000, "headers_too_large"),
    "trailers": (CHUNKED + b"1\r\nx\r\n0\r\n", b"X: y\r\n" * 10_000, "headers_too_large"),
    "a chunk's extension": (CHUNKED + b"1;", b"x" * 65_536, "headers_too_large"),
    "a chunk's size": (CHUNKED, b"0" * 65_536, "headers_too_large"),
    "a body in chunks": (CHUNKED, b"%x\r\n%b\r\n" % (65_536, b"x" * 65_536), "body_too_large"),
    "one chunk": (CHUNKED + b"fffffff\r\n", b"x" * 65_536, "body_too_large"),
}


async def test_bombs_are_refused_by_what_is_too_large_of_them(attacked: Attack) -> None:
    """Ten of each at once, 100 MB each if they were let: 11 GB in all."""
    router = await attacked(proper, limits={"body_bytes": 4 * MIB}, timeouts={"header_s": 60, "body_s": 60})
    kinds = [kind for kind in BOMBS.values() for _ in range(10)]
    clients = await router.clients(len(kinds))
    pours = (poured(client, *kind[:2], 100 * MIB) for client, kind in zip(clients, kinds, strict=True))
    sent = await asyncio.gather(*pours)
    for client, (_, _, reason) in zip(clients, kinds, strict=True):
        answer = await client.answer()
        assert (answer.status, answer.header("x-warmroute-reason")) == (
            431 if reason == "headers_too_large" else 413,
            reason,
        )
    assert max(sent) < 100 * MIB, "none was read to its end"
    assert not [request for request in router.upstream.requests if request.target != "/control" and request.body]
    assert router.peak < 200 * MIB
    await router.unharmed()


async def test_headers_that_are_few_bytes_and_many_objects_are_counted_as_what_they_cost(attacked: Attack) -> None:
    """12,000 headers fit into 64 KiB of bytes and take megabytes of memory, for as long as the request waits."""
    router = await attacked(silent)
    clients = await router.clients(100)
    for client in clients:
        client.send(b"GET / HTTP/1.1\r\nHost: a\r\n" + b"X:\r\n" * 12_000 + b"\r\n")
    for client in clients:
        answer = await client.answer()
        assert (answer.status, answer.header("x-warmroute-reason")) == (431, "headers_too_large")
    assert router.grown < 60 * MIB
    await router.unharmed()


async def test_extensions_of_small_chunks_are_ended_by_the_bodys_timeout(attacked: Attack) -> None:
    """Each read brings a byte of body, so that it is no head without end; it is not kept, and time is bounded."""
    router = await attacked(proper, timeouts={"body_s": 1})
    clients = await router.clients(10)
    block = b"1;%b\r\nx\r\n" % (b"x" * 1_000)
    await asyncio.gather(*(poured(client, CHUNKED, block * 60, 1 << 40) for client in clients))
    for client in clients:
        answer = await client.answer()
        assert answer.header("x-warmroute-reason") in ("body_timeout", "headers_too_large")
    assert router.peak < 40 * MIB
    await router.unharmed()


async def test_requests_sent_ahead_by_the_thousand_do_not_fill_memory(attacked: Attack) -> None:
    """100 clients send small requests without end behind one that is never answered. One read holds thousands of
    them: of those the connection is refused; of what is sent piece by piece reading stops."""
    router = await attacked(silent, timeouts={"first_byte_s": 600})
    clients = await router.clients(100)
    for client in clients:
        client.send(get("/never"))
    await router.reached("warmroute_in_flight_requests", 100)
    tiny = b"GET / HTTP/1.1\r\nHost:a\r\n\r\n" * 40_000
    for client in clients:
        client.send(tiny)
    await router.unharmed(20)
    assert router.grown < 150 * MIB, f"{router.grown / MIB / 100:.1f} MiB each"
    for client in clients:
        client.reset()
    await router.gauge("warmroute_in_flight_requests", 0)


async def test_connections_that_reset_at_once_leave_nothing(attacked: Attack) -> None:
    router = await attacked(proper)
    for _ in range(10):
        for number, client in enumerate(await router.clients(100)):
            client.send((get(), post(), CHUNKED, b"GET", b"\x16\x03\x01\x02\x00\x01")[number % 5])
            client.reset()
    await router.unharmed(20)
    assert router.peak < 20 * MIB


async def test_bodies_all_at_once_are_bounded_in_total(attacked: Attack) -> None:
    router = await attacked(
        proper,
        limits={"body_bytes": 8 * MIB, "body_memory_bytes": 64 * MIB},
        timeouts={"body_s": 60},
    )
    clients = await router.clients(40)
    request = post(body=b"x" * 8 * MIB)
    for client in clients:
        client.send(request[:-1])
    reasons: list[str | None] = []
    waiting: list[RawClient] = []
    await router.refused("body_memory", 30)
    for client in clients:
        if client.received:
            reasons.append((await client.answer()).header("x-warmroute-reason"))
        else:
            waiting.append(client)
    assert set(reasons) == {"body_memory"}
    assert router.peak < 300 * MIB, "64 MiB of bodies, what the allocator keeps, and what was in the sockets"
    for client in waiting:
        client.send(request[-1:])
    for client in waiting:
        assert (await client.answer()).body == b"%d" % (8 * MIB)


async def test_json_that_is_made_to_be_slow_is_passed_on_as_it_is(attacked: Attack) -> None:
    """Bodies are looked into for the session: what cannot be read is no session. A megabyte each, in 4 ways."""
    bodies = [
        b'{"messages":' + b"[" * 500_000 + b"]" * 500_000 + b"}",
        b"{" + b",".join(b'"k%d":0' % n for n in range(100_000)) + b"}",
        b'{"messages":[' + b",".join([b"{}"] * 300_000) + b"]}",
        b'{"messages":[{"role":"user","content":"' + b"\\u0041" * 160_000 + b'"}]}',
    ]
    router = await attacked(proper, timeouts={"body_s": 60})
    clients = await router.clients(len(bodies))
    answers = await asyncio.gather(*(client.ask(post(body=body)) for client, body in zip(clients, bodies, strict=True)))
    assert [answer.body for answer in answers] == [b"%d" % len(body) for body in bodies]
    assert router.peak < 100 * MIB
    await router.unharmed()


async def test_sessions_without_end_fill_a_directory_of_fixed_size(attacked: Attack) -> None:
    router = await attacked(proper, directory={"max_sessions": 1_000})

    async def flood(number: int) -> None:
        client = await router.client()
        for n in range(500):
            session = f"X-Session-Affinity: {number}-{n}"
            assert (await client.ask(post("/v1/chat/completions", b"{}" * 100, session))).status == 200

    await asyncio.gather(*(flood(number) for number in range(10)))
    assert await router.metric("warmroute_sessions") <= 1_000
    assert router.grown < 30 * MIB
    await router.unharmed()


async def test_more_connections_than_open_files_are_not_blamed_on_replicas(attacked: Attack) -> None:
    """The router takes no more connections than leave it descriptors; should it run out of them all the same, that
    says nothing of its replicas."""
    # Who asks keeps the connections of both sides, however busy the machine is.
    router = await attacked(proper, health={"interval_s": 60, "passive_fail_after": 1}, pool={"idle_s": 600})
    router.newcomer = False
    await router.unharmed()
    resource.prlimit(router.router.pid, resource.RLIMIT_NOFILE, (100, 100))
    for _ in range(3):
        flood = await router.clients(300)
        await router.unharmed(20)
        for client in flood:
            client.reset()
        await router.gauge("warmroute_connections", 1)
    assert await router.metric(f'warmroute_replica_state{{replica="{router.upstream.url}",state="ready"}}') == 1
    router.newcomer = True
