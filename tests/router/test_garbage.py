"""The collector: off while the router serves, and yet nothing in cycles stays for ever."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from collections.abc import AsyncIterator

import pytest

from router.garbage import Garbage


class Cycle:
    """Something that refers to itself."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
async def garbage() -> AsyncIterator[Garbage]:
    collector = Garbage(busy=lambda: True, clock=time.monotonic)
    collector.start()
    yield collector
    collector.stop()


async def test_the_automatic_collector_rests_meanwhile(garbage: Garbage) -> None:
    assert not gc.isenabled()
    garbage.stop()
    assert gc.isenabled()


async def test_a_cycle_left_by_a_request_is_collected(garbage: Garbage) -> None:
    gone = asyncio.Event()
    cycle = Cycle()
    weakref.finalize(cycle, gone.set)
    del cycle
    async with asyncio.timeout(10):
        await gone.wait()
