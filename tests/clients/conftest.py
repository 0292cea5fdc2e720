"""Three emulated replicas for the whole run, made whole and empty before each test, and a router of each test's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.clients.agents import MODULES, Agent, Session
from tests.clients.fleet import Emulator, Fleet
from tests.fakes.process import start_router

LOGS = MODULES.parent / "logs"


@pytest.fixture(scope="session")
def emulators() -> Iterator[list[Emulator]]:
    """Those that a test has killed are still in the list."""
    assert (MODULES.parent / "installed-lock.json").exists(), "no agents are installed: run scripts/clients/install"
    started = [Emulator(LOGS / f"replica-{number}.log") for number in range(3)]
    try:
        yield started
    finally:
        for emulator in started:
            emulator.stop()


@pytest.fixture
def fleet(emulators: list[Emulator]) -> Iterator[Fleet]:
    """Three replicas that hold nothing, and a router that knows no session."""
    for number, emulator in enumerate(emulators):
        if not emulator.alive:
            emulator.stop()
            emulators[number] = Emulator(emulator.log)
    for emulator in emulators:
        emulator.wait_ready()
        emulator.reset()
    urls = [emulator.url for emulator in emulators]
    with start_router(urls, LOGS / "router.log", "--policy", "session_affinity") as router:
        yield Fleet(emulators, router)


@pytest.fixture
def new_session(fleet: Fleet, tmp_path: Path) -> Callable[[Agent], Session]:
    """Begins sessions, each in a home of its own."""
    count = 0

    def begin(agent: Agent) -> Session:
        nonlocal count
        count += 1
        return Session(agent, tmp_path / f"{agent.name}-{count}", fleet.router.url)

    return begin
