"""A first request waits, briefly, for what other routers know of its session."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from policies.sharing import Note
from router.sharing import Sharing
from router.store import MemoryStore, Message, Remembered
from tests.fakes.client import get, post
from tests.fakes.logged import logged
from tests.fakes.proxied import Proxied
from tests.fakes.upstream import Peer, ok
from tests.fakes.wire import eventually
from tests.proxy.conftest import Warm
from tests.proxy.test_room import Faulty
from tests.sharing.sites import Held

CHAT = "/v1/chat/completions"
SESSION = "x-session-affinity: s-1"


async def named(peer: Peer) -> None:
    """Answers everything."""
    while True:
        await peer.request()
        peer.send(ok(b"{}"))


async def shared(router: Proxied, store: MemoryStore, wait_s: float = 30.0) -> Sharing:
    sharing = Sharing(store, router.balancer, name="this", wait_s=wait_s, timeout_s=1.0, clock=time.monotonic)
    await sharing.start()
    router.proxy.sharing = sharing
    return sharing


async def asked_by(router: Proxied, *headers: str) -> str:
    """The replica that answered a turn."""
    client = await router.client()
    client.send(post(CHAT, b'{"messages": []}', *headers))
    answer = await client.answer()
    assert answer.status == 200
    return str(answer.header("x-warmroute-replica"))


async def known_elsewhere(router: Proxied, store: MemoryStore, replica: str) -> None:
    """Another router has served a turn of the session there."""
    await asked_by(router, SESSION)
    key = next(iter(router.balancer.directory.keys()))
    router.balancer.directory.forget(key)
    await store.tell(Message("other", [Note(key, 0, b"", False, 1.0, replica, "", 50_000, 50_000)]))


async def test_a_session_known_elsewhere_goes_where_it_is_known_to_be(warm: Warm) -> None:
    router = await warm(named, named, named, policy="session_affinity")
    store = MemoryStore(time.monotonic)
    await known_elsewhere(router, store, "c")
    sharing = await shared(router, store)
    try:
        assert await asked_by(router, SESSION) == "c"
        assert sharing.claims["adopted"] == 1
        assert await asked_by(router, SESSION) == "c"
        assert sharing.claims["adopted"] == 1, "it is known from now on"
    finally:
        await sharing.stop()


async def test_no_answer_in_time_is_no_reason_to_wait(warm: Warm) -> None:
    router = await warm(named, named, policy="session_affinity")
    store = Held(time.monotonic)
    sharing = await shared(router, store, wait_s=0.01)
    try:
        await asked_by(router, SESSION)
        assert sharing.claims["late"] == 1
    finally:
        await sharing.stop()


async def test_a_fault_that_is_no_stores_is_no_reason_to_wait(warm: Warm, caplog: pytest.LogCaptureFixture) -> None:
    class Raising(MemoryStore):
        async def claim(self, note: Note) -> Sequence[Remembered]:
            raise ZeroDivisionError

    router = await warm(named, named, policy="session_affinity")
    sharing = await shared(router, Raising(time.monotonic))
    try:
        await asked_by(router, SESSION)
        assert sharing.claims["failed"] == sharing.faults["claim"] == 1
    finally:
        await sharing.stop()
    assert [record.levelname for record in logged(caplog, "warmroute.store")][-1] == "ERROR"


async def test_a_fault_of_the_policy_that_proposes_is_an_answer_not_a_wait(warm: Warm) -> None:
    router = await warm(named)
    router.balancer.switch(Faulty(), router.proxy.clock())
    sharing = await shared(router, MemoryStore(time.monotonic))
    try:
        client = await router.client()
        client.send(post(CHAT, b'{"messages": []}', SESSION))
        assert (await client.answer()).status == 500
    finally:
        await sharing.stop()


async def test_a_client_that_leaves_meanwhile_leaves_nothing(warm: Warm) -> None:
    router = await warm(named, policy="session_affinity")
    store = Held(time.monotonic)
    sharing = await shared(router, store)
    try:
        client = await router.client()
        client.send(post(CHAT, b'{"messages": []}', SESSION))
        await eventually(lambda: store.asked, "the store is asked")
        assert router.balancer.in_flight == 0, "what has no place is no load"
        client.transport.abort()
        await router.ended("client/queue")
        assert router.balancer.in_flight == 0
        store.answers.set()
        assert await asked_by(router, "x-session-affinity: s-2") == "a"
    finally:
        await sharing.stop()


async def test_what_is_no_turn_and_what_has_no_session_asks_nobody(warm: Warm) -> None:
    router = await warm(named, policy="session_affinity")
    store = Held(time.monotonic)
    sharing = await shared(router, store)
    try:
        client = await router.client()
        client.send(get("/v1/models", SESSION))
        assert (await client.answer()).status == 200
        assert store.asked == []
    finally:
        await sharing.stop()
