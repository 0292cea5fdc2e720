"""Pools behind several routers: a session's homes, one in each, are known to all of them."""

from __future__ import annotations

from tests.sharing.several import Session, Several, once_more

NAMES = ("one", "two", "three", "four")


async def test_a_session_has_one_home_in_each_pool_through_whichever_router(several: Several) -> None:
    several.pools = ("emulated", "fast")
    several.server.start()
    one, other = await several.start(2)
    large = [Session(name) for name in NAMES]
    small = [Session(name, model="fast") for name in NAMES]
    for session, begun_at in zip((*large, *small), (one, other) * len(NAMES), strict=True):
        await session.turn(begun_at.port)
    assert {session.home for session in large} <= {"r0", "r2"}
    assert {session.home for session in small} <= {"r1", "r3"}
    for router in (other, one, other):
        assert await once_more([*large, *small], router) == []
