"""The simulator's replicas beside emulated ones behind a real router: what they do with the same requests.

How long that takes on the wall depends on the machine, so that `python -m benchmarks.fidelity` compares it. What is
compared here does not: choices, tokens, and the time that the model itself counted.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import fidelity, fleet
from benchmarks.conversations import Answered, Session, play
from sim.emulator import Emulator, EmulatorConfig
from sim.machine import DEFAULT_MACHINE
from sim.replay import replay
from sim.work import Totals
from tests.fakes.process import Router

LIMIT_S = 60
REPLICAS = 3
SCALE = 0.1
"""Ten times as fast as engines."""


async def over_sockets(sessions: list[Session], folder: Path) -> tuple[list[Answered], list[Totals]]:
    """What clients got, and what the replicas counted."""
    config = EmulatorConfig(time_scale=SCALE, hardware=DEFAULT_MACHINE, page_size=fidelity.PAGE_TOKENS)
    async with AsyncExitStack() as stack:
        replicas = [await stack.enter_async_context(Emulator(config)) for _ in range(REPLICAS)]
        settings = folder / "config.json"
        settings.write_text(
            fleet.configuration([each.url for each in replicas], fidelity.POLICY, folder / "journal.jsonl")
        )
        router = Router((), folder / "log", "--config", str(settings))
        stack.push_async_callback(asyncio.to_thread, router.stop)
        await asyncio.to_thread(router.wait_ok, f"{router.admin_url}/readyz", LIMIT_S)
        answers = await play(router.url, sessions, fidelity.SESSIONS.system_tokens)
        return answers, [replica.engine.schedulers[0].replica.totals for replica in replicas]


async def test_the_simulator_does_with_a_journal_what_the_emulator_did(tmp_path: Path) -> None:
    sessions = [replace(each, turns=each.turns[:6]) for each in fidelity.draw(16, REPLICAS, SCALE)]
    answers, counted = await over_sockets(sessions, tmp_path)

    again = replay(tmp_path / "journal.jsonl")
    assert (again.different, again.differences, again.whole, again.lost) == (0, [], True, 0)
    assert again.choices == len(answers) == sum(len(each.turns) for each in sessions) > 60

    requests = {(each.session, each.turn): each for each in fidelity.placed(tmp_path / "journal.jsonl", sessions)}
    replicas = fidelity.force(list(requests.values()), SCALE)
    pairs = [(answer, requests[answer.session, answer.turn]) for answer in answers]
    assert all(answer.replica == request.replica for answer, request in pairs)
    assert all(answer.prompt_tokens == request.work.prompt_tokens for answer, request in pairs)
    # A request is with the router before it is with the replica. On a slow machine another may have ended meanwhile.
    same = [answer.cached_tokens == request.work.cached_tokens for answer, request in pairs]
    assert sum(same) >= 0.9 * len(same)
    assert all(answer.cached_tokens for answer in answers if answer.turn)

    simulated = [replicas[name].totals for name in fleet.names(REPLICAS)]
    for real, model in zip(counted, simulated, strict=True):
        assert (real.finished, real.output_tokens) == (model.finished, model.output_tokens)
    assert total(simulated, "prefill_tokens") == pytest.approx(total(counted, "prefill_tokens"), rel=0.1)
    # Those of the simulator are slowed, so that they are of the router's clock.
    assert total(simulated, "prefill_seconds") == pytest.approx(total(counted, "prefill_seconds") * SCALE, rel=0.1)


def total(totals: list[Totals], name: str) -> float:
    return sum(getattr(each, name) for each in totals)
