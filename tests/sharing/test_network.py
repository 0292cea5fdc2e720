"""The network between a router and its store is slow, or cut without a sign: nobody's request fails, and all heals."""

from __future__ import annotations

from collections.abc import AsyncIterator
from itertools import count

import pytest

from tests.fakes.cable import Cable
from tests.fakes.process import Router
from tests.fakes.waiting import until
from tests.fakes.wire import LIMIT_S
from tests.sharing.several import THERE, TROUBLE, Load, Several, asked, named, once_more


@pytest.fixture
async def cable(several: Several) -> AsyncIterator[Cable]:
    """To the store, which runs."""
    several.server.start()
    cable = Cable(several.server.path)
    yield cable
    await cable.stop()


async def behind(cable: Cable, several: Several, wait_s: float) -> Router:
    """A router that reaches the store through the cable alone."""
    port = await cable.start()
    [router] = await several.start(url=f"redis://127.0.0.1:{port}", wait_s=wait_s)
    return router


async def test_a_router_that_is_cut_off_serves_and_is_one_of_them_again(several: Several, cable: Cable) -> None:
    far = await behind(cable, several, wait_s=0.1)
    [near] = await several.start()
    ports = {f"cut off {number}": (far, near)[number % 2].port for number in range(8)}
    old = Load(named("cut off", 8), lambda session: ports[session.name])
    await old.turns(1)
    cable.cut()
    await several.says(far, *TROUBLE)
    new = Load(named("new while cut off", 4), lambda _: far.port)
    await old.turns(1)
    await new.turns(2)
    cable.mend()
    await several.says(far, THERE, times=2)
    sessions = [*old.sessions, *new.sessions]
    await several.stored(sessions)
    for load in (old, new):
        await load.end()
        assert load.broken == []
        assert load.moved == []
    assert await once_more(sessions, near) == []


async def test_a_slow_way_to_the_store_holds_up_nobody_for_longer_than_they_wait(
    several: Several, cable: Cable
) -> None:
    far = await behind(cable, several, wait_s=0.02)
    cable.delay_s = 0.2
    load = Load(named("slow", 6), lambda _: far.port)
    await load.turns(2)
    await load.end()
    assert load.broken == []
    assert load.moved == []

    async def claims() -> dict[str, int]:
        return dict((await asked(far, "GET", "/overview"))["store"]["claims"])

    seen = await claims()
    assert seen["late"] > 0, "the store was too slow to be waited for"
    assert seen["late"] + seen["not_asked"] == len(load.sessions)
    cable.delay_s = 0.0
    await several.stored(load.sessions)

    numbers = count()

    async def answered() -> int:
        [session] = named(f"in time {next(numbers)}", 1)
        await session.turn(far.port)
        return (await claims())["claimed"]

    await until(answered, lambda claimed: claimed > 0, LIMIT_S, "claims are answered in time again")
