"""Several router processes and a real store: sessions keep their homes, whatever becomes of routers and store."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import pytest

from tests.fakes.process import Router
from tests.fakes.waiting import until
from tests.fakes.wire import LIMIT_S
from tests.sharing.several import THERE, TROUBLE, Load, Several, asked, kill, named, once_more


@pytest.fixture
async def pair(several: Several) -> tuple[Router, Router]:
    """Two routers with a store."""
    several.server.start()
    one, other = await several.start(2)
    return one, other


async def test_turns_reach_their_home_through_whichever_router(pair: tuple[Router, Router]) -> None:
    sessions = named("whichever", 16)
    for router in (*pair, *pair):
        await asyncio.gather(*(session.turn(router.port) for session in sessions[:8]))
    for session in sessions[8:]:  # back and forth, faster than any message
        for router in (*pair, *pair):
            await session.turn(router.port)
    for session in sessions:
        assert len({turn.replica for turn in session.turns}) == 1, session.turns
        assert session.warm(), session.turns
    assert len({session.home for session in sessions}) > 1


async def test_a_killed_routers_sessions_are_at_home_through_the_other(pair: tuple[Router, Router]) -> None:
    doomed, other = pair
    ports = {"now": doomed.port}
    sessions = named("doomed", 16)
    load = Load(sessions, lambda _: ports["now"])
    await load.turns(1)
    kill(doomed)
    ports["now"] = other.port
    await load.turns(2)
    await load.end()
    assert load.broken, "it was killed under load"
    assert load.moved == []


@pytest.mark.parametrize("what", ["paused", "killed", "flushed"])
async def test_a_store_that_fails_costs_no_request_and_knows_all_again(
    several: Several, pair: tuple[Router, Router], what: str
) -> None:
    """Sessions stay with their router meanwhile, as clients do. Some begin while the store is away, some are silent."""
    ports = {f"{what} {number}": pair[number % 2].port for number in range(12)}
    ports |= {f"new while {what} {number}": pair[number % 2].port for number in range(4)}
    silent = named(f"silent while {what}", 4)
    for number, session in enumerate(silent):
        await session.turn(pair[number % 2].port)
    old = Load(named(what, 12), lambda session: ports[session.name])
    await old.turns(1)
    server = several.server
    if what == "flushed":
        server.ask("FLUSHALL")
    elif what == "paused":
        server.pause()
    else:
        server.kill()
    new = Load(named(f"new while {what}", 4), lambda session: ports[session.name])
    for router in pair:
        await several.says(router, *(["the store has forgotten"] if what == "flushed" else TROUBLE))
    await new.turns(1)
    await old.turns(1)
    if what == "paused":
        server.resume()
    elif what == "killed":
        server.start()
    await several.stored([*old.sessions, *new.sessions, *silent])
    for load in (old, new):
        await load.end()
        assert load.broken == []
        assert load.moved == []
    [fresh] = await several.start()
    assert await once_more([*old.sessions, *new.sessions, *silent], fresh) == []


async def test_a_store_that_comes_later_is_found_and_told(several: Several) -> None:
    [early] = await several.start(says=TROUBLE)
    sessions = named("early", 8)
    await asyncio.gather(*(session.turn(early.port) for session in sessions))
    several.server.start()
    await several.says(early, THERE)
    await several.stored(sessions)
    [late] = await several.start()
    assert await once_more(sessions, late) == []


async def test_a_rolling_restart_breaks_no_stream_and_keeps_homes(
    several: Several, pair: tuple[Router, Router]
) -> None:
    serving = list(pair)
    sessions = named("rolling", 24)
    for session in sessions[:4]:
        session.output_tokens = 3_000  # under way for longer than a router takes to begin its drain
    load = Load(sessions, lambda session: serving[len(session.turns) % 2].port)
    await load.turns(1)
    for number, old in enumerate(pair):
        [serving[number]] = await several.start()
        old.signal(signal.SIGTERM)
        assert await asyncio.to_thread(old.wait_end, LIMIT_S) == 0
        await load.turns(2)
    await load.end()
    assert load.broken == []
    assert len(load.moved) <= len(sessions) / 100, load.moved


async def test_orders_at_one_router_hold_at_all(several: Several, pair: tuple[Router, Router]) -> None:
    async def drained(router: Router) -> set[str]:
        told = (await asked(router, "GET", "/replicas"))["replicas"]
        return {each["id"] for each in told if each["state"] == "finishing"}

    async def policy(router: Router) -> tuple[str, Any]:
        told = await asked(router, "GET", "/policy")
        return told["policy"], told["parameters"]

    one, other = pair
    await asked(one, "POST", "/replicas/r1/drain", {"homes": "finish"})
    given = {"name": "random", "parameters": {"seed": 7}}
    await asked(one, "PUT", "/policy", given)
    await until(lambda: drained(other), lambda ids: ids == {"r1"}, LIMIT_S, "the drain is heard of")
    switched = await policy(one)
    assert switched[0] == "random"
    await until(lambda: policy(other), lambda now: now == switched, LIMIT_S, "so is the policy")
    [later] = await several.start()
    await until(lambda: drained(later), lambda ids: ids == {"r1"}, LIMIT_S, "the drain is obeyed by one started later")
    assert await policy(later) == switched
    await asked(later, "DELETE", "/replicas/r1/drain")
    for router in pair:
        await until(lambda r=router: drained(r), lambda ids: not ids, LIMIT_S, "its end is heard of")  # type: ignore[misc]
