"""What the core learns from answers: only what the engine itself said or showed."""

from __future__ import annotations

import json

import pytest

from policies.events import Event, Finished, FirstToken, ReplicaChanged, Routed
from policies.round_robin import RoundRobin
from policies.types import Replica
from router.ask import Asker
from router.health import Health
from router.proxy.upstream import Upstream
from router.settings import HealthSettings
from tests.fakes.client import get, post
from tests.fakes.logged import logged
from tests.fakes.proxied import Proxied
from tests.fakes.upstream import LAST_CHUNK, REFUSING, SSE_HEAD, Peer, always, chunk, ok
from tests.fakes.wire import eventually
from tests.proxy.conftest import Warm
from tests.proxy.test_streams import PIECE

USAGE = {"prompt_tokens": 50_000, "completion_tokens": 400, "prompt_tokens_details": {"cached_tokens": 1_000}}
WHOLE = ok(json.dumps({"choices": [], "usage": USAGE}).encode(), "Content-Type: application/json")
EVENTS = [b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n', b"data: %b\n\n" % json.dumps({"usage": USAGE}).encode()]
BODY = json.dumps({"messages": [{"role": "user", "content": "x" * 2_000}], "stream": True}).encode()
SESSION = "Modal-Session-Id: s"


async def streaming(peer: Peer) -> None:
    while True:
        await peer.request()
        peer.send(SSE_HEAD + b"".join(map(chunk, EVENTS)) + chunk(b"data: [DONE]\n\n") + LAST_CHUNK)


async def _asked(router: Proxied, request: bytes, status: int = 200) -> Replica:
    client = await router.client()
    client.send(request)
    assert (await client.answer()).status == status
    replica = router.replica("a")
    await eventually(lambda: replica.in_flight == 0, "the lease is given back")
    return replica


def _observations(replica: Replica) -> tuple[int, int]:
    return replica.speed.prefills, replica.speed.decodes


async def test_a_stream_teaches_speeds_and_a_whole_answer_does_not(warm: Warm) -> None:
    """Its first byte comes with its last: 400 tokens in no time, after a prefill that took as long as they did."""
    router = await warm(streaming, policy="session_affinity")
    assert _observations(await _asked(router, post("/v1/chat/completions", BODY, SESSION))) == (1, 1)
    router = await warm(always(WHOLE), policy="session_affinity")
    replica = await _asked(router, post("/v1/chat/completions", BODY, SESSION))
    assert _observations(replica) == (0, 0)
    assert replica.cache.held_tokens == 50_400


@pytest.mark.parametrize("status", ["400 Bad Request", "404 Not Found", "422 Unprocessable Entity", "429 Too Many"])
async def test_a_prompt_that_the_engine_refused_is_not_resident(warm: Warm, status: str) -> None:
    router = await warm(always(ok(b'{"error":{}}', status=status)), policy="session_affinity")
    replica = await _asked(router, post("/v1/chat/completions", BODY, SESSION), int(status[:3]))
    assert (replica.cache.held_tokens, replica.pending, replica.pending_s) == (0, 0, 0.0)
    assert _observations(replica) == (0, 0)


async def test_what_is_no_turn_is_not_resident(warm: Warm) -> None:
    router = await warm(always(ok(b'{"data":[]}')), policy="session_affinity")
    assert (await _asked(router, get("/v1/models", SESSION))).cache.held_tokens == 0


async def test_a_slow_reader_says_nothing_of_the_engine(warm: Warm) -> None:
    async def gushing(peer: Peer) -> None:
        await peer.request()
        peer.send(SSE_HEAD + chunk(EVENTS[0]))
        for _ in range(400):
            peer.send(chunk(PIECE))
            await peer.drain()
        peer.send(chunk(EVENTS[1]) + chunk(b"data: [DONE]\n\n") + LAST_CHUNK)

    router = await warm(gushing, policy="session_affinity")
    client = await router.client()
    client.transport.pause_reading()
    client.send(post("/v1/chat/completions", BODY, SESSION))
    await eventually(lambda: any(d.paused_since is not None for d in router.proxy.downstreams), "the client lags")
    client.transport.resume_reading()
    assert (await client.answer()).status == 200
    replica = router.replica("a")
    await eventually(lambda: replica.in_flight == 0, "the lease is given back")
    assert replica.cache.held_tokens == 50_400
    assert _observations(replica) == (0, 0)


class Slip(RoundRobin):
    """Makes a mistake when it hears of an end."""

    def observe(self, event: Event) -> None:
        if isinstance(event, Finished):
            raise ValueError("math domain error")


async def test_a_mistake_in_learning_costs_no_request_and_leaves_nothing_open(
    warm: Warm, caplog: pytest.LogCaptureFixture
) -> None:
    router = await warm(streaming, limits={"connections": 5})
    router.balancer.switch(Slip(), 0.0)
    client = await router.client()
    for _ in range(3):
        client.send(post("/v1/chat/completions", BODY, SESSION))
        assert (await client.answer()).status == 200
    await eventually(lambda: router.replica("a").in_flight == 0)
    assert (router.balancer.in_flight, router.balancer.pending, router.proxy.body_bytes) == (0, 0, 0)
    assert len([each for each in logged(caplog, "warmroute.proxy") if "taught nothing" in each.message]) == 3


@pytest.mark.parametrize(("slip", "status"), [(Routed, 500), (FirstToken, 200)])
async def test_a_mistake_in_learning_before_the_end_is_answered_and_leaves_nothing_open(
    warm: Warm, slip: type[Event], status: int
) -> None:
    class Early(RoundRobin):
        def observe(self, event: Event) -> None:
            if isinstance(event, slip):
                raise ValueError("math domain error")

    router = await warm(streaming, admission={"max_running": 1, "max_waiting": 0})
    router.balancer.switch(Early(), 0.0)
    client = await router.client()
    for _ in range(2):
        client.send(post("/v1/chat/completions", BODY, SESSION))
        assert (await client.answer()).status == status
        await eventually(lambda: router.balancer.in_flight == 0, "the lease is given back")
    assert (router.balancer.pending, router.replica("a").in_flight, router.proxy.body_bytes) == (0, 0, 0)


class Slips(RoundRobin):
    """Makes a mistake when it hears of the end of a request, and of a replica that is not what it was."""

    def observe(self, event: Event) -> None:
        if isinstance(event, (Finished, ReplicaChanged)):
            raise ValueError("math domain error")
        super().observe(event)


async def test_a_mistake_in_learning_from_a_failure_costs_no_request_either(
    warm: Warm, caplog: pytest.LogCaptureFixture
) -> None:
    router = await warm(REFUSING, streaming)
    given = HealthSettings(passive_fail_after=1, interval_s=60.0, panic_share=0.0)
    health = Health(router.balancer, given, router.proxy.clock)
    address = router.replica("a").address
    assert isinstance(address, Upstream)
    health.watch(router.replica("a"), Asker(address))
    router.proxy.health = health
    router.balancer.switch(Slips(), 0.0)
    client = await router.client()
    client.send(post("/v1/chat/completions", BODY, SESSION))
    assert (await client.answer()).status == 200
    assert router.replica("a").in_flight == 0
    told = [each.message for each in logged(caplog, "warmroute.proxy")]
    assert told[:2] == [
        "a failure was not noted, in a way it should not",
        "a failure taught nothing, in a way it should not",
    ]
    await health.forget(router.replica("a"))
