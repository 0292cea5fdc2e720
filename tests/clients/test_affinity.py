"""A coding agent's session stays on one replica, known by the rule that fits the agent."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.clients.agents import AGENTS, Agent, Session
from tests.clients.fleet import Fleet, Seen

pytestmark = [pytest.mark.clients, pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.name)]

MOST_SESSIONS = 16
"""All of them on one of three replicas by chance: once in 14 million runs."""


def test_all_turns_of_a_session_land_on_one_replica(
    agent: Agent, fleet: Fleet, new_session: Callable[[Agent], Session]
) -> None:
    session = new_session(agent)
    turns = [fleet.turn(session, prompt) for prompt in ("say hello", "say it again", "and once more")]
    assert {turn.rule for turn in turns} == {agent.rule}
    assert len({turn.session for turn in turns}) == 1
    assert len({turn.replica for turn in turns}) == 1
    assert [turn.reason for turn in turns[1:]] == ["home", "home"]
    # The replicas' caches were empty, and only the one that has had the turn before can have half of this prompt.
    assert all(turn.cached_tokens > turn.prompt_tokens / 2 for turn in turns[1:]), turns


def test_sessions_spread_over_replicas_and_each_stays_at_its_own(
    agent: Agent, fleet: Fleet, new_session: Callable[[Agent], Session]
) -> None:
    begun: list[tuple[Session, Seen]] = []
    while len({seen.replica for _, seen in begun}) < 2:
        assert len(begun) < MOST_SESSIONS, f"{len(begun)} sessions and all on {begun[0][1].replica}"
        session = new_session(agent)
        begun.append((session, fleet.turn(session, f"this is session {len(begun)}")))
    assert len({seen.session for _, seen in begun}) == len(begun)
    for session, seen in (begun[0], begun[-1]):
        assert fleet.turn(session, "go on").replica == seen.replica
