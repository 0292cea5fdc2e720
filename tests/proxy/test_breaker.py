"""The circuit breaker over real sockets: what opens it, what does not, and the way back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress

import pytest

from policies.types import State
from router.ask import Asker
from router.breaker import Circuit
from router.health import Health
from router.proxy.upstream import Upstream
from router.settings import HealthSettings
from tests.fakes.client import Ended, post
from tests.fakes.proxied import Proxied
from tests.fakes.upstream import Peer, RawRequest, Script, chunk, chunked_head, ok, silent
from tests.fakes.wire import eventually
from tests.proxy.conftest import Warm
from tests.proxy.test_redispatch import reason

# Probes quicker than the settings allow; without the panic rule, which in these small fleets would use what is ejected.
SETTINGS = HealthSettings(open_s=100.0, panic_share=0.0).model_copy(update={"interval_s": 0.02, "deep_interval_s": 1e5})


class Clock:
    """The loop's, which a test puts forward: no circuit's time is up before the test says so."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return asyncio.get_running_loop().time() + self.ahead_s


class Replica:
    """Answers its probes, and requests as it is told to."""

    def __init__(self, answer: bytes | Script) -> None:
        self.answer = answer
        self.requests = 0
        """Those that were no probes."""

    async def __call__(self, peer: Peer) -> None:
        while True:
            request: RawRequest = await peer.request()
            if request.target == "/ready":
                peer.send(ok())
                continue
            self.requests += 1
            if isinstance(self.answer, bytes):
                peer.send(self.answer)
            else:
                await self.answer(peer)
                return


async def reset(peer: Peer) -> None:
    """A script that breaks off before it answers."""
    peer.reset()


async def breaking(peer: Peer) -> None:
    """A script that begins a stream and breaks it off."""
    peer.send(chunked_head() + chunk(b"first"))
    await peer.drain()
    peer.transport.close()


Watched = Callable[..., Awaitable[tuple[Proxied, Health]]]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def watched(warm: Warm, clock: Clock) -> AsyncIterator[Watched]:
    """A router whose health is the real one, over probes that pass."""
    started: list[tuple[Proxied, Health]] = []

    async def start(
        *scripts: Script, settings: HealthSettings = SETTINGS, **sections: object
    ) -> tuple[Proxied, Health]:
        router = await warm(*scripts, **sections)
        health = Health(router.balancer, settings, clock)
        for replica in router.balancer.replicas.values():
            assert isinstance(replica.address, Upstream)
            health.watch(replica, Asker(replica.address))
        router.proxy.health = health
        started.append((router, health))
        return router, health

    yield start
    for router, health in started:
        for replica in router.balancer.replicas.values():
            await health.forget(replica)


async def _until(router: Proxied, name: str, state: State) -> None:
    replica = router.replica(name)
    await eventually(lambda: replica.state is state, f"{name} is {state}, not {replica.state}")


async def _ask(router: Proxied, count: int = 1) -> list[int]:
    """Statuses; 0 where the answer broke off."""
    found = []
    for _ in range(count):
        client = await router.client()
        try:
            found.append((await client.ask(post())).status)
        except Ended:
            found.append(0)
    return found


async def test_a_burst_of_5xx_opens_it_and_only_that_ones(watched: Watched) -> None:
    sick, well = Replica(ok(b"{}", status="500 Internal Server Error")), Replica(ok())
    router, health = await watched(sick, well)
    statuses = await _ask(router, 10)
    assert sorted(statuses) == [200] * 5 + [500] * 5, "an engine's own error is passed on"
    breaker = health.breaker(router.replica("a"))
    assert breaker is not None
    assert (breaker.state, breaker.why) == (Circuit.OPEN, "5 requests in a row failed, the last by a 500")
    assert router.replica("a").state is State.EJECTED
    assert router.replica("b").state is State.READY


@pytest.mark.parametrize("status", ["400 Bad Request", "404 Not Found", "413 Too Large", "429 Too Many"])
async def test_4xx_never_opens_it(watched: Watched, status: str) -> None:
    router, _ = await watched(Replica(ok(b"{}", status=status)))
    assert await _ask(router, 30) == [int(status[:3])] * 30
    assert router.replica("a").state is State.READY


async def test_a_full_queue_never_opens_it(watched: Watched) -> None:
    async def busy(peer: Peer) -> None:
        peer.send(ok(b'{"error":{}}', status="503 Service Unavailable"))
        await peer.drain()
        peer.transport.close()

    router, _ = await watched(Replica(busy))
    assert set(await _ask(router, 30)) == {503}
    assert router.replica("a").state is State.READY


async def test_streams_that_break_open_it_though_each_began_well(watched: Watched) -> None:
    router, health = await watched(Replica(breaking))
    assert await _ask(router, 3) == [0, 0, 0]
    await _until(router, "a", State.EJECTED)
    assert health.why(router.replica("a")) == "3 requests in a row failed, the last by broken"


async def test_clients_that_leave_never_open_it(watched: Watched) -> None:
    """Before a byte came, and in the middle of a stream."""

    async def begun(peer: Peer) -> None:
        peer.send(chunked_head() + chunk(b"first"))
        await peer.end()

    hanging, streaming = Replica(silent), Replica(begun)
    router, _ = await watched(hanging, streaming)
    for count in range(1, 21):
        client = await router.client()
        client.send(post())
        await eventually(lambda count=count: hanging.requests + streaming.requests >= count)
        if streaming.requests * 2 == count:
            with suppress(Ended):
                await client.up_to(b"first\r\n")
        client.close()
        await eventually(lambda count=count: sum(router.metrics.outcomes.values()) >= count)
    assert (hanging.requests, streaming.requests) == (10, 10)
    assert {replica.state for replica in router.balancer.replicas.values()} == {State.READY}


async def test_requests_that_are_reset_open_it_and_cost_no_client_anything(watched: Watched) -> None:
    router, _ = await watched(Replica(reset), Replica(ok()))
    assert set(await _ask(router, 8)) == {200}
    assert router.replica("a").state is State.EJECTED
    assert router.metrics.redispatches == {"reset": 3}


async def test_refused_connections_open_it_before_a_probe_could(watched: Watched) -> None:
    settings = SETTINGS.model_copy(update={"interval_s": 1e5})
    router, health = await watched(Replica(ok()), Replica(ok()), settings=settings)
    router.upstreams[0].stop_listening()
    assert set(await _ask(router, 8)) == {200}
    assert health.why(router.replica("a")) == "3 requests in a row failed, the last by connect"


async def test_the_way_back_leads_through_one_request(watched: Watched, clock: Clock) -> None:
    sick = Replica(reset)
    router, health = await watched(sick)
    assert set(await _ask(router, 3)) == {503}
    client = await router.client()
    assert reason(await client.ask(post())) == (503, "all_ejected")
    clock.ahead_s += SETTINGS.open_s
    await _until(router, "a", State.HALF_OPEN)
    assert await _ask(router) == [503]
    await _until(router, "a", State.EJECTED)
    breaker = health.breaker(router.replica("a"))
    assert breaker is not None
    assert (breaker.trips, breaker.why) == (2, "a request failed while it was on trial, by reset")
    sick.answer = ok()
    clock.ahead_s += 2 * SETTINGS.open_s
    await _until(router, "a", State.HALF_OPEN)
    assert await _ask(router) == [200]
    assert router.replica("a").state is State.READY


async def test_only_so_many_are_on_trial_at_once(watched: Watched, clock: Clock) -> None:
    answer = asyncio.Event()

    async def slow(peer: Peer) -> None:
        await answer.wait()
        peer.send(ok())
        await peer.drain()

    sick = Replica(reset)
    router, _ = await watched(sick)
    await _ask(router, 3)
    sick.answer = slow
    clock.ahead_s += SETTINGS.open_s
    await _until(router, "a", State.HALF_OPEN)
    asked = sick.requests
    clients = [await router.client() for _ in range(5)]
    for client in clients:
        client.send(post())
    await eventually(lambda: router.metrics.refusals["all_ejected"] == 4, "three are refused, and the one before")
    await eventually(lambda: sick.requests - asked >= 2, "the others have arrived")
    assert (sick.requests - asked, router.replica("a").trials) == (2, 2)
    answer.set()
    answers = [await client.answer() for client in clients]
    refused = [each for each in answers if each.status == 503]
    assert [reason(each) for each in refused] == [(503, "all_ejected")] * 3
    assert sorted(each.status for each in answers) == [200, 200, 503, 503, 503]
    assert (router.replica("a").state, router.replica("a").trials) == (State.READY, 0)


async def test_with_three_of_four_dead_the_fourth_serves_all(watched: Watched) -> None:
    """The panic rule is in force, and sends nothing where connections are refused."""
    settings = SETTINGS.model_copy(update={"panic_share": 0.5})
    router, health = await watched(*[Replica(ok()) for _ in range(4)], settings=settings)
    for upstream in router.upstreams[:3]:
        upstream.stop_listening()
        for peer in upstream.connections:
            peer.transport.abort()
    await eventually(lambda: [r.id for r in router.balancer.ready] == ["d"], "the dead are known as such")
    assert health.panic
    assert set(await _ask(router, 20)) == {200}
    assert not router.metrics.redispatches


async def test_with_three_of_four_failing_requests_all_are_used(watched: Watched) -> None:
    """In a panic a failure is redispatched as ever."""
    settings = SETTINGS.model_copy(update={"panic_share": 0.5})
    sick = [Replica(reset) for _ in range(3)]
    router, health = await watched(*sick, Replica(ok()), settings=settings, retries={"tries": 4, "budget_burst": 100})
    assert set(await _ask(router, 12)) == {200}
    assert health.panic
    assert len(router.balancer.ready) == 4
    for replica in sick:
        replica.answer = ok()
    before = [replica.requests for replica in sick]
    assert set(await _ask(router, 8)) == {200}
    assert [replica.requests - then for replica, then in zip(sick, before, strict=True)] == [2, 2, 2]
