"""A coding agent does not notice that the replica of its session fails: the run goes on at another and exits with 0."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable

import pytest

from tests.clients.agents import AGENTS, Agent, Session
from tests.clients.fleet import Emulator, Fleet

pytestmark = [pytest.mark.clients, pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.name)]

REQUEST_LIMIT_S = 60


@pytest.mark.parametrize("fault", [{"queue_full": True}, {"status": 503}], ids=["queue_full", "503"])
def test_home_that_refuses(
    agent: Agent, fault: dict[str, object], fleet: Fleet, new_session: Callable[[Agent], Session]
) -> None:
    session = new_session(agent)
    first = fleet.turn(session, "say hello")
    fleet.replica(first.replica).fault(**fault)
    second = fleet.turn(session, "say it again")
    assert second.session == first.session
    assert second.replica != first.replica
    assert second.tries == 2, "the agent was to see no error at all"
    assert second.failed


def test_home_that_dies_before_the_first_byte(
    agent: Agent, fleet: Fleet, new_session: Callable[[Agent], Session]
) -> None:
    session = new_session(agent)
    first = fleet.turn(session, "say hello")
    home = fleet.replica(first.replica)
    home.fault(hang=True)
    killer = threading.Thread(target=_kill_at_next_request, args=(home, len(home.requests())))
    killer.start()
    second = fleet.turn(session, "say it again")
    killer.join()
    assert not home.alive
    assert second.session == first.session
    assert second.replica != first.replica


def _kill_at_next_request(replica: Emulator, before: int) -> None:
    """Kill the replica once it has received a request more; without one it lives, which the test will notice."""
    deadline = time.monotonic() + REQUEST_LIMIT_S
    while time.monotonic() < deadline:
        if len(replica.requests()) > before:
            replica.signal(signal.SIGKILL)
            replica.wait_end(REQUEST_LIMIT_S)
            return
        time.sleep(0.05)
