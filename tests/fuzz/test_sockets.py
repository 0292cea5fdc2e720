"""The same grammar over real sockets, on uvloop: fewer cases, with the kernel's own ways of cutting and ending."""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from pathlib import Path
from random import Random

import pytest
import uvloop

from router.identity import DEFAULT_RULES, IdentityRules
from router.settings import PolicySettings, Settings
from tests.fakes.proxied import Proxied
from tests.fakes.upstream import Peer, ScriptedUpstream
from tests.fakes.wire import Ended, eventually
from tests.fuzz import grammar, oracle
from tests.fuzz.oracle import Relay

CASES = 160
BLOCK = 20
CLIENTS = 8
"""At once, each with a case of its own, over two replicas."""


async def replica(rng: Random, relays: dict[bytes, list[Relay]], peer: Peer) -> None:
    """Answer as the grammar says, in pieces; who changed bytes or ends the connection goes after it."""
    for number in itertools.count():
        request = await peer.request()
        found, why = oracle.requests(request.raw_head + request.body)
        assert not why, f"h11 cannot read what was relayed: {why}"
        (asked,) = found
        reply = grammar.answer(rng, request.method, b"<%d>" % number, 0.3)
        relay = Relay(asked, excess_forbidden=not reply.ends)
        relays[asked.target.partition(b"?")[2].partition(b"r")[0]].append(relay)
        for piece in grammar.cut(rng, reply.raw)[:60]:
            relay.raw += piece
            peer.send(piece)
            await asyncio.sleep(0)
        if reply.ends or not reply.honest:
            relay.ended = True
            return


async def block(first: int, log: Path) -> None:
    relays: dict[bytes, list[Relay]] = defaultdict(list)
    rng = Random(first)
    upstreams = [await ScriptedUpstream(lambda peer: replica(rng, relays, peer)).start() for _ in range(2)]
    settings = Settings(
        policy=PolicySettings(name="round_robin"),
        response_headers=True,
        timeouts={"header_s": 0.3, "body_s": 0.3, "keep_alive_s": 0.3, "first_byte_s": 1, "idle_s": 1},  # type: ignore[arg-type]
        limits={"header_bytes": 4_000, "body_bytes": 20_000},  # type: ignore[arg-type]
        retries={"budget_burst": 1000},  # type: ignore[arg-type]
    )
    router = Proxied(settings, IdentityRules(DEFAULT_RULES, b""), log, sweep_s=0.05)
    try:
        await router.start([upstream.url for upstream in upstreams])

        async def one(number: int) -> None:
            own = Random(number)
            name = b"c%d" % number
            parts = [grammar.request(own, f"c{number}r{n}") for n in range(own.choice((1, 2, 4, 20)))]
            if own.random() < 0.5:
                which = own.randrange(len(parts))
                parts[which] = grammar.mutated(own, parts[which])
            raw = b"".join(parts)
            client = await router.client()
            try:
                for piece in grammar.cut(own, raw):
                    client.send(piece)
                    await asyncio.sleep(0)
            except Ended:
                pass
            how = await client.end()
            client.close()
            out = bytes(client.buffer)
            oracle.check(raw, relays[name], out, closed=True, aborted=how == "reset", strict=False)

        for start in range(first, first + BLOCK, CLIENTS):
            await asyncio.gather(*(one(number) for number in range(start, start + CLIENTS)))
        await eventually(lambda: not router.proxy.downstreams)
    finally:
        await router.stop()
        for upstream in upstreams:
            await upstream.stop()


@pytest.mark.parametrize("first", range(0, CASES, BLOCK))
def test_over_real_sockets_the_same_holds(first: int, tmp_path: Path) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(block(first, tmp_path / "log"))
