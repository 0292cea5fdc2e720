"""Emulated replicas in the test's own loop."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from sim.emulator import Emulator, EmulatorConfig


@pytest.fixture
async def fast() -> AsyncIterator[Emulator]:
    """A replica so fast that every answer is there at once."""
    async with Emulator(EmulatorConfig(time_scale=0.0001)) as emulator:
        yield emulator


@pytest.fixture
async def slow() -> AsyncIterator[Emulator]:
    """A replica in real time, with one slot and one place in its queue."""
    async with Emulator(EmulatorConfig(max_running_requests=1, max_queued_requests=1)) as emulator:
        yield emulator
