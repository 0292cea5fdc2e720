"""Requests beyond the caps wait in a room, in turn, for a while; then they are told when to come again."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence

import pytest

from policies.admission import AdmissionConfig
from policies.admission.gate import STEPS
from policies.round_robin import RoundRobin
from policies.types import Choice, Load, Replica, Request
from tests.fakes.client import Answer, RawClient, get, post
from tests.fakes.logged import logged
from tests.fakes.proxied import Proxied
from tests.fakes.upstream import REFUSING, Peer, RawRequest, ok
from tests.fakes.wire import eventually
from tests.proxy.conftest import Warm

CHAT = "/v1/chat/completions"


class InTurn:
    """A replica's script: it answers when it is told to, in the order in which requests came."""

    def __init__(self) -> None:
        self.held: list[tuple[RawRequest, asyncio.Future[None]]] = []
        self.seen: list[str] = []
        """Bodies, in the order in which they came."""

    async def __call__(self, peer: Peer) -> None:
        while True:
            request = await peer.request()
            self.seen.append(request.body.decode())
            if request.method == "POST":
                turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                self.held.append((request, turn))
                await turn
            peer.send(ok(request.body))

    async def running(self, count: int) -> None:
        await eventually(lambda: len(self.held) == count, f"{count} requests run; seen {self.seen}")

    def answer(self) -> None:
        """The one that came first of those that run."""
        self.held.pop(0)[1].set_result(None)


async def ask(router: Proxied, body: str, *headers: str) -> RawClient:
    """Send a request, and have the router take it in before the next is sent."""
    client = await router.client()
    taken = router.balancer.leases + router.proxy.room.admission.waiting
    client.send(post(CHAT, body.encode(), *headers))
    await eventually(lambda: router.balancer.leases + router.proxy.room.admission.waiting > taken, f"{body} is in")
    return client


async def refused(client: RawClient) -> tuple[int, str, int]:
    """Status, reason and seconds to wait; body, header and status agree."""
    answer = await client.answer()
    reason = json.loads(answer.body)["error"]["code"]
    assert answer.header("x-warmroute-reason") == reason
    return answer.status, reason, int(answer.header("retry-after") or 0)


async def test_what_is_beyond_the_cap_waits_and_is_served_in_turn(warm: Warm) -> None:
    replica = InTurn()
    router = await warm(replica, admission={"max_running": 1})
    clients = [await ask(router, body) for body in ("one", "two", "three")]
    for number, body in enumerate(("one", "two", "three")):
        await replica.running(1)
        assert replica.seen[number:] == [body]
        replica.answer()
        answer = await clients[number].answer()
        assert (answer.status, answer.body) == (200, body.encode())
    lines = await router.lines(3)
    assert "queued_s" not in lines[0]
    assert all(0 < line["queued_s"] <= line["duration_s"] for line in lines[1:])


async def test_each_replica_gets_no_more_than_its_cap(warm: Warm) -> None:
    replicas = (InTurn(), InTurn())
    router = await warm(*replicas, policy="round_robin", admission={"max_running_per_replica": 1})
    clients = [await ask(router, body) for body in ("one", "two", "three", "four")]
    for replica in replicas:
        await replica.running(1)
    replicas[1].answer()
    await eventually(lambda: len(replicas[1].seen) == 2, "its place is taken by the next")
    assert replicas[0].seen == ["one"]
    replicas[0].answer()
    await eventually(lambda: len(replicas[0].seen) == 2, "so is the other's")
    for replica in replicas:
        await replica.running(1)
        replica.answer()
    assert {(await client.answer()).body for client in clients} == {b"one", b"two", b"three", b"four"}


async def test_a_client_that_leaves_the_room_gives_its_place(warm: Warm) -> None:
    replica = InTurn()
    router = await warm(replica, admission={"max_running": 1, "max_waiting": 1})
    first = await ask(router, "first")
    await replica.running(1)
    leaving = await ask(router, "leaving")
    leaving.transport.abort()
    await router.ended("client/queue")
    last = await ask(router, "last")
    replica.answer()
    await replica.running(1)
    replica.answer()
    assert (await first.answer()).body == b"first"
    assert (await last.answer()).body == b"last"
    assert replica.seen == ["first", "last"]


async def test_a_full_room_refuses_and_says_when_to_come_again(warm: Warm) -> None:
    replica = InTurn()
    router = await warm(replica, admission={"max_running": 1, "max_waiting": 1})
    await ask(router, "runs")
    await ask(router, "waits")
    client = await router.client()
    client.send(post(CHAT, b"too many"))
    status, reason, retry_after_s = await refused(client)
    assert (status, reason) == (503, "room_full")
    assert 1 <= retry_after_s <= 60
    assert (await router.lines())[0]["refusal"] == "room_full"
    assert router.metrics.refusals == {"room_full": 1}


async def test_nobody_waits_longer_than_the_deadline(warm: Warm) -> None:
    replica = InTurn()
    router = await warm(replica, admission={"max_running": 1, "max_wait_s": 0.2})
    await ask(router, "runs")
    waiting = await ask(router, "waits")
    status, reason, retry_after_s = await refused(waiting)
    assert (status, reason) == (503, "wait_too_long")
    assert 1 <= retry_after_s <= 60
    assert replica.seen == ["runs"]
    (line,) = await router.lines()
    assert (line["phase"], line["tries"]) == ("queue", 0)
    assert line["queued_s"] >= 0.2


async def test_a_sessions_fan_out_does_not_starve_another(warm: Warm) -> None:
    replica = InTurn()
    router = await warm(replica, admission={"max_running": 1})
    first = "x-session-affinity: first"
    for number in range(10):
        await ask(router, f"first {number}", first)
    await ask(router, "second", "x-session-affinity: second")
    for _ in range(11):
        await replica.running(1)
        replica.answer()
    await eventually(lambda: len(replica.seen) == 11, "all are served")
    before = replica.seen.index("second")
    assert before <= 4, "the one that runs, the one whose turn it was already, and two as they may be warm by then"


async def test_the_priority_header_goes_before(warm: Warm) -> None:
    replica = InTurn()
    # No sweep comes before all are in: whose turn it is then, goes before whoever comes later.
    router = await warm(replica, sweep_s=60.0, admission={"max_running": 1, "priority_header": "X-Priority"})
    for body, priority in (("runs", "normal"), ("low", "low"), ("normal", "NORMAL"), ("high", "high")):
        await ask(router, body, f"x-priority: {priority}", f"x-session-affinity: {body}")
    for _ in range(4):
        await replica.running(1)
        replica.answer()
    await eventually(lambda: len(replica.seen) == 4, "all are served")
    assert replica.seen == ["runs", "high", "normal", "low"]


@pytest.mark.parametrize(("setting", "status"), [("x-priority", 400), ("", 200)])
async def test_a_priority_that_is_none_is_refused_only_where_the_header_means_something(
    warm: Warm, setting: str, status: int
) -> None:
    async def echo(peer: Peer) -> None:
        peer.send(ok((await peer.request()).body))

    router = await warm(echo, admission={"priority_header": setting})
    client = await router.client()
    answer: Answer = await client.ask(post(CHAT, b"{}", "x-priority: urgent"))
    assert answer.status == status
    if status == 400:
        assert json.loads(answer.body)["error"]["code"] == "priority"


async def test_a_request_without_a_body_does_not_wait(warm: Warm) -> None:
    replica = InTurn()
    router = await warm(replica, admission={"max_running": 1})
    await ask(router, "runs")
    client = await router.client()
    assert (await client.ask(get("/v1/models"))).status == 200


async def test_a_redispatch_does_not_wait_again(warm: Warm) -> None:
    replica = InTurn()
    router = await warm(REFUSING, replica, policy="round_robin", admission={"max_running": 1, "max_waiting": 0})
    client = await ask(router, "redispatched")
    await replica.running(1)
    replica.answer()
    assert (await client.answer()).body == b"redispatched"
    (line,) = await router.lines()
    assert (line["tries"], line["failed"]) == (2, "connect")


async def test_the_log_says_when_the_kv_gate_acts_and_when_it_is_open(
    warm: Warm, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "warmroute.proxy")
    replica = InTurn()
    router = await warm(replica)
    client = await ask(router, "a" * 4_000, "x-session-affinity: s")
    await replica.running(1)
    replica.answer()
    assert (await client.answer()).status == 200
    now, room = router.proxy.clock(), router.proxy.room
    router.balancer.report(router.replica("a"), Load(now, capacity_tokens=500), now)
    gate = room.admission.gate
    gate.tenures.seek()
    assert not gate.tenures.find(STEPS, now)
    gate.capacity_tokens = gate._capacity()
    gate._begin(now)
    await eventually(lambda: bool(logged(caplog, "warmroute.proxy")))
    room.admission.configure(AdmissionConfig(kv_gate=False), now)
    room.look()
    assert [record.getMessage() for record in logged(caplog, "warmroute.proxy")] == [
        "the KV gate acts: live sessions do not fit the KV caches of 500 tokens, and are let in up to 800",
        "the KV gate is open: no session is held back any more",
    ]


class Faulty(RoundRobin):
    """A policy with a fault of its own."""

    def pick(self, request: Request, candidates: Sequence[Replica], now: float) -> Choice:
        raise ZeroDivisionError


async def test_a_fault_of_the_policy_in_the_room_is_an_answer_not_a_wait(warm: Warm) -> None:
    replica = InTurn()
    router = await warm(replica, admission={"max_running": 1})
    first = await ask(router, "first")
    await replica.running(1)
    second = await ask(router, "second")
    router.balancer.switch(Faulty(), router.proxy.clock())
    replica.answer()
    assert (await first.answer()).status == 200
    assert (await second.answer()).status == 500
