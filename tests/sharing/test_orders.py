"""Orders that were given while the store could not hear them stand when it can."""

from __future__ import annotations

import time

from policies import registry
from router.drains import Homes
from router.store import MemoryStore
from tests.fakes.wire import eventually
from tests.sharing.test_seen import shown
from tests.sharing.test_sharing import Faulty


async def test_a_drain_that_was_taken_back_meanwhile_does_not_come_again() -> None:
    store = MemoryStore(time.monotonic)
    faulty = Faulty(store)
    async with shown(faulty, store) as (one, other):
        orders, drains = one.router.orders, one.router.fleet.drains
        orders.drain("r1", Homes.MOVE, "an operator")
        await eventually(lambda: other.router.fleet.drains, "the other router obeys")
        faulty.refuses = True
        await eventually(lambda: not one.sharing.up, "the store is away")
        orders.undrain("r1", "an operator")
        faulty.refuses = False
        await eventually(lambda: not other.router.fleet.drains, "the other router hears of it")
        assert one.sharing.up
        assert not drains


async def test_a_drain_that_was_ordered_meanwhile_stands() -> None:
    store = MemoryStore(time.monotonic)
    faulty = Faulty(store)
    async with shown(faulty, store) as (one, other):
        faulty.refuses = True
        await eventually(lambda: not one.sharing.up, "the store is away")
        one.router.orders.drain("r1", Homes.FINISH, "an operator")
        faulty.refuses = False
        await eventually(lambda: other.router.fleet.drains, "the other router obeys")
        assert one.router.fleet.drains


async def test_of_two_orders_the_last_that_was_told_holds_everywhere() -> None:
    """Also at the router that it was given at, which hears of the earlier one later."""
    store = MemoryStore(time.monotonic)
    faulty = Faulty(store)
    async with shown(faulty, store) as (one, other):
        faulty.refuses = True
        await eventually(lambda: not one.sharing.up, "the store is away")
        other.router.orders.switch(registry.make("random", {}), "an operator")
        await eventually(lambda: "policy" in store._controls, "it is told")
        one.router.orders.switch(registry.make("round_robin", {}), "an operator")
        faulty.refuses = False
        await eventually(lambda: other.router.balancer.policy.name == "round_robin", "the other router hears of it")
        other.router.orders.drain("r1", Homes.MOVE, "an operator")
        await eventually(lambda: one.router.fleet.drains, "all is heard of")
        assert one.router.balancer.policy.name == "round_robin"
