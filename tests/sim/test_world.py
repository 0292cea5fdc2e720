"""Whole runs: repeatable, and nothing lost or made up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policies.types import Load
from sim import scenario as scenarios
from sim.scenario import SCENARIOS, Scenario
from sim.workload import Forks, Synthetic
from sim.world import World

SMALL = replace(
    SCENARIOS["r80"],
    replicas=4,
    warm_up_s=20.0,
    measured_s=100.0,
    spread_s=20.0,
    synthetic=Synthetic(turns=6.0, forks=Forks(probability=0.15)),
)

EVENTS = {
    "nothing": (),
    "scale-out": ((40.0, lambda world: world.scale_out(1)),),
    "scale-in": ((40.0, lambda world: world.scale_in(1)),),
    "crash": ((40.0, lambda world: world.crash(20.0)),),
    "lost": ((40.0, lambda world: world.restart_router()),),
    "slow": ((0.0, lambda world: world.slow_down(3.0)),),
    "switch": ((40.0, lambda world: world.switch("least_loaded", {})),),
}


def drained(scenario: Scenario, seed: int = 1, policy: str = "rendezvous") -> World:
    """A run to the end of its last session."""
    world = scenarios.build(scenario, seed, policy, {})
    now = scenario.warm_up_s + scenario.measured_s
    world.run(now)
    while world.live and now < 5_000.0:
        now += 100.0
        world.run(now)
    assert world.live == 0
    return world


@pytest.mark.parametrize("policy", ["round_robin", "least_loaded", "rendezvous", "session_affinity"])
def test_the_same_seed_gives_the_same_course(policy: str) -> None:
    first, second, other = (scenarios.run(SMALL, seed, policy, {}) for seed in (1, 1, 2))
    assert first == second
    assert first["digest"] != other["digest"]


@pytest.mark.parametrize("what", EVENTS)
@pytest.mark.parametrize("policy", ["round_robin", "session_affinity"])
def test_what_is_asked_is_answered_and_load_ends_at_zero(what: str, policy: str) -> None:
    world = drained(replace(SMALL, events=EVENTS[what]), policy=policy)
    served = world.measure.served
    assert all(s.first_token is not None for s in served)
    assert sum(s.finished is None for s in served) == world.measure.broken
    for view in world.balancer.replicas.values():
        assert (view.in_flight, view.prefill_tokens) == (0, 0)
    for server in world.servers:
        assert server.replica.idle
        assert server.replica.cache.pinned_pages == server.replica.cache.allocated_pages == 0
        assert not server.calls
    if what == "crash":
        assert world.measure.broken + sum(s.tries > 1 for s in served) > 0
    else:
        assert world.measure.broken == 0
    assert len(world.servers) == {"scale-out": 5, "scale-in": 3}.get(what, 4)


def test_tokens_are_conserved() -> None:
    """Every prompt token was either found or computed, and every answer has its length."""
    world = drained(SMALL)
    served = world.measure.served
    totals = [server.replica.totals for server in world.servers]
    assert sum(t.prompt_tokens for t in totals) == sum(s.prompt_tokens for s in served)
    assert sum(t.cached_tokens + t.prefill_tokens for t in totals) == sum(s.prompt_tokens for s in served)
    assert sum(t.cached_tokens for t in totals) == sum(s.cached_tokens for s in served)
    assert sum(t.output_tokens for t in totals) == sum(s.output_tokens for s in served)
    assert sum(t.finished for t in totals) == len(served)


def test_every_prompt_token_is_found_or_regretted_or_new() -> None:
    """Without forks, what is new depends on the sessions alone, but for who computes the common system prompt first."""
    system = 12_000
    calm = replace(SMALL, synthetic=Synthetic(system_tokens=system, turns=6.0, forks=Forks(probability=0.0)))
    new, regretted = {}, {}
    for policy in ("round_robin", "rendezvous"):
        served = drained(calm, policy=policy).measure.served
        regretted[policy] = sum(s.elsewhere_tokens for s in served)
        known = sum(s.cached_tokens + s.evicted_tokens for s in served) + regretted[policy]
        new[policy] = sum(s.prompt_tokens for s in served) - known
    assert new["round_robin"] == pytest.approx(new["rendezvous"], abs=(calm.replicas - 1) * system)
    assert regretted["rendezvous"] <= (calm.replicas - 1) * system
    assert regretted["round_robin"] > new["round_robin"] / 2


def test_sessions_are_the_same_for_every_policy() -> None:
    asked = []
    for policy in ("round_robin", "rendezvous"):
        world = drained(SMALL, policy=policy)
        asked.append({s.name: (s.prompt_tokens, s.output_tokens, s.main) for s in world.measure.served})
    assert asked[0] == asked[1]


def test_an_idle_replica_that_holds_all_serves_in_the_ideal_time() -> None:
    """One session alone on one replica without a break of its prefix has no excess."""
    alone = replace(
        SMALL, replicas=1, load=0.2, stay=True, synthetic=Synthetic(turns=20.0, forks=Forks(probability=0.0))
    )
    world = drained(alone)
    assert len({s.name.split("#")[0] for s in world.measure.served}) == 1
    for s in world.measure.served:
        assert s.first_token is not None
        assert s.first_token - s.arrived == pytest.approx(s.ideal_s)


def test_reports_are_late_and_true() -> None:
    world = scenarios.build(SMALL, 1, "round_robin", {})
    ages = set()
    for step in range(1, 60):
        now = 10.0 + 0.7 * step
        world.run(now)
        for view in world.balancer.replicas.values():
            load = view.load
            assert isinstance(load, Load)
            assert load.capacity_tokens == 450_000
            assert load.host_capacity_tokens == 1_800_000
            ages.add(round(now - load.at, 3))
    assert min(ages) >= world.fleet.report_delay_s
    assert max(ages) <= world.fleet.report_delay_s + world.fleet.report_interval_s + 1e-6
    assert len(ages) > 10


def test_a_returned_replica_is_empty_and_known_to_be() -> None:
    world = scenarios.build(replace(SMALL, events=EVENTS["crash"]), 1, "rendezvous", {})
    world.run(39.0)
    crashed = world.servers[0]
    assert crashed.replica.cache.tree_pages > 0
    world.run(59.0)
    assert not crashed.up
    assert crashed.replica.idle
    assert world.balancer.replicas[crashed.id] not in world.balancer.ready
    world.run(60.5)
    view = world.balancer.replicas[crashed.id]
    assert view in world.balancer.ready
    assert view.since == 60.0


def test_scale_out_with_a_hash_loses_the_share_of_the_new_replicas() -> None:
    scenario = replace(SCENARIOS["N50x250"], warm_up_s=100.0, measured_s=200.0)
    stays = replace(scenario, stay=True, synthetic=Synthetic(turns=1e9, forks=Forks(probability=0.0)))
    world = scenarios.build(replace(stays, events=((150.0, lambda w: w.scale_out(12)),)), 1, "rendezvous", {})
    world.run(300.0)
    joined = world.measure.joined
    assert joined.resident > 200
    assert joined.to_new / joined.resident == pytest.approx(12 / 62, abs=0.07)
    assert joined.to_new == joined.elsewhere


def test_static_fill() -> None:
    """250 equal sessions on 50 replicas: hashing puts about 2.2 times the mean on the fullest (placement.md, 5.1)."""
    result = scenarios.run(SCENARIOS["static"], 1, "rendezvous", {})
    assert result["sessions"] == 250
    assert 1.7 <= float(str(result["sessions_max_over_mean"])) <= 2.8


def test_the_cliff() -> None:
    """Past what the host tier holds, about 24 recorded sessions a replica, caching collapses."""
    small = replace(SCENARIOS["int4"], replicas=2)
    hits = {}
    for load in (0.6, 1.8):
        hits[load] = float(str(scenarios.run(replace(small, load=load), 11, "rendezvous", {})["hit_total"]))
    assert hits[0.6] > 0.93
    assert hits[1.8] < 0.8
