"""The seconds that a placement is chosen by are those that come to pass, in queues and where KV memory is full."""

from __future__ import annotations

import pytest

from policies.lease import Lease
from sim import scenario, scenario_file


@pytest.fixture(scope="module")
def waits() -> list[tuple[float, float, bool]]:
    """Of each request of recorded sessions at 80 %: the seconds expected to its first token, those it took, and whether
    it had to wait for room."""
    plan = scenario_file.find("int4", {"load": 0.8})
    world = scenario.build(plan, 11, "session_affinity", {})
    [router] = world.front.routers
    seen: list[tuple[float, float, bool]] = []

    def on_home(lease: Lease) -> None:
        if lease.finished and lease.first_token_at is not None:
            choice = lease.choice
            took = lease.first_token_at - lease.opened_at
            seen.append((choice.wait_s + choice.prefill_s, took, choice.wait_s > 0.0))

    router.balancer.on_home = on_home
    world.run(plan.end)
    world.close()
    return seen


@pytest.mark.parametrize(("least", "most"), [(0.5, 1.0), (1.0, 2.0), (2.0, 4.0), (4.0, 8.0)])
def test_what_is_expected_to_wait_waits_as_long(
    waits: list[tuple[float, float, bool]], least: float, most: float
) -> None:
    """On average within a quarter; without room for KV the first two took twice what was expected of them."""
    chosen = [(expected, took) for expected, took, waited in waits if waited and least <= expected < most]
    assert len(chosen) > 100
    expected = sum(each for each, _ in chosen)
    took = sum(each for _, each in chosen)
    assert took / expected == pytest.approx(1.0, abs=0.25)


def test_what_is_expected_not_to_wait_does_not(waits: list[tuple[float, float, bool]]) -> None:
    chosen = [(expected, took) for expected, took, waited in waits if not waited]
    late = [took - expected for expected, took in chosen if took > expected + 1.0]
    assert len(chosen) > 5_000
    assert len(late) < 0.02 * len(chosen)
