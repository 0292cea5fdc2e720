"""Whole runs: repeatable, and nothing lost or made up."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.types import Load
from sim import hardware
from sim.fleet import PICKED, Fleet, Group, Role
from sim.measure import Measure
from sim.prefix_cache import HostWrite
from sim.routers import ONE, Routers, Sharing, Spread
from sim.work import Limits
from sim.workload import NO_FORKS, Conversation, Forks, Population, Synthetic, SyntheticWorkload, arrivals
from sim.world import World

PAGE = 256
TIMES = hardware.load("kimi-nvfp4-tp4-fp8")
LIMITS = Limits(691_000, PAGE, host_tokens=2_800_000)
UNIFIED = (Group(4, TIMES, LIMITS),)
SHORT = Synthetic(turns=6.0, forks=Forks(probability=0.15))
END = 80.0

Events = tuple[tuple[float, Callable[[World], None]], ...]


@dataclass(frozen=True)
class Plan:
    """A small run."""

    groups: tuple[Group, ...] = UNIFIED
    live: int = 16
    stay: bool = False
    synthetic: Synthetic = SHORT
    routers: Routers = ONE
    events: Events = ()
    patience_s: float = inf
    link_bytes_per_s: float = 50e9
    cold_tokens: int = 20_000


def build(
    plan: Plan, seed: int = 1, policy: str = "rendezvous", parameters: Mapping[str, object] | None = None
) -> World:
    workload = SyntheticWorkload(plan.synthetic, PAGE, seed)
    seconds = inf if plan.stay else 60.0

    def sessions() -> Iterator[tuple[float, Conversation]]:
        population = Population(plan.live, seconds, spread_s=20.0, burst_share=0.0)
        for time, index, initial in arrivals(population, workload.random("arrivals"), END):
            conversation = workload.session(index, initial=initial)
            conversation.turns = (replace(turn, patience_s=plan.patience_s) for turn in conversation.turns)
            yield time, conversation

    measure = Measure(20.0, END)
    measure.keep = True
    fleet = Fleet(plan.groups, link_bytes_per_s=plan.link_bytes_per_s, cold_tokens=plan.cold_tokens)
    world = World(policy, parameters or {}, fleet, sessions(), Random(seed), measure, routers=plan.routers)
    for time, event in plan.events:
        world.engine.at(time, event, world)
    return world


def drained(plan: Plan, seed: int = 1, policy: str = "rendezvous") -> World:
    """A run to the end of its last session."""
    world = build(plan, seed, policy)
    now = END
    world.run(now)
    while world.live and now < 5_000.0:
        now += 100.0
        world.run(now)
    assert world.live == 0
    return world


def result(plan: Plan, seed: int = 1, policy: str = "rendezvous") -> dict[str, object]:
    world = build(plan, seed, policy)
    world.run(END)
    world.close()
    return world.measure.result()


EVENTS: dict[str, Events] = {
    "nothing": (),
    "scale-out": ((40.0, lambda world: world.scale_out(1)),),
    "scale-in": ((40.0, lambda world: world.scale_in(1)),),
    "crash": ((40.0, lambda world: world.crash(20.0)),),
    "restarted": ((40.0, lambda world: world.restart_router()),),
    "store lost": ((40.0, lambda world: world.lose_store()),),
    "slow": ((0.0, lambda world: world.slow_down(3.0)),),
    "switch": ((40.0, lambda world: world.switch("least_loaded", {})),),
}

FLEETS: dict[str, tuple[Group, ...]] = {
    "unified": UNIFIED,
    "two machines": (
        Group(2, TIMES, LIMITS, "new"),
        Group(2, hardware.load("kimi-int4-tp4-bf16"), Limits(346_000, PAGE), "old"),
    ),
    "prefill and decode": (
        Group(2, TIMES, LIMITS, "p", Role.PREFILL),
        Group(2, TIMES, Limits(691_000, PAGE), "d", Role.DECODE),
    ),
    "warm and cold": (Group(3, TIMES, LIMITS, "w", Role.WARM), Group(1, TIMES, LIMITS, "c", Role.COLD)),
    "warm, cold and decode": (
        Group(2, TIMES, Limits(691_000, PAGE), "d", Role.DECODE),
        Group(2, TIMES, LIMITS, "w", Role.WARM),
        Group(1, TIMES, LIMITS, "c", Role.COLD),
    ),
}


@pytest.mark.parametrize("policy", ["round_robin", "least_loaded", "rendezvous", "session_affinity"])
def test_the_same_seed_gives_the_same_course(policy: str) -> None:
    first, second, other = (result(Plan(), seed, policy) for seed in (1, 1, 2))
    assert first == second
    assert first["digest"] != other["digest"]


@pytest.mark.parametrize("what", EVENTS)
@pytest.mark.parametrize(("fleet", "routers"), [*((fleet, 1) for fleet in FLEETS), ("unified", 3)])
def test_what_is_asked_is_answered_and_load_ends_at_zero(what: str, fleet: str, routers: int) -> None:
    plan = Plan(FLEETS[fleet], live=12, events=EVENTS[what], routers=Routers(routers))
    world = drained(plan, policy="session_affinity")
    served = world.measure.served
    assert all(s.first_token is not None for s in served)
    assert sum(s.finished is None for s in served) == world.measure.broken
    for router in world.front.routers:
        for view in router.balancer.replicas.values():
            assert (view.in_flight, view.prefill_tokens) == (0, 0)
    for server in world.servers:
        assert server.replica.idle
        assert server.replica.cache.pinned_pages == server.replica.cache.allocated_pages == 0
        assert (server.engaged, server.tokens) == (0, 0)
        assert not server.calls
    assert not any(world.measure.placed.values()), "no session that has ended is still counted anywhere"
    assert world.measure.result()["sessions_max_over_mean"] == 0.0
    if what == "crash":
        assert world.measure.broken + sum(s.tries > 1 for s in served) > 0
    else:
        assert world.measure.broken == 0
    assert len(world.servers) == world.fleet.replicas + {"scale-out": 1, "scale-in": -1}.get(what, 0)


@pytest.mark.parametrize("fleet", FLEETS)
@pytest.mark.parametrize("host_write", HostWrite)
def test_tokens_are_conserved(fleet: str, host_write: HostWrite) -> None:
    """Every prompt token was either found or computed, and every answer has its length."""
    groups = tuple(
        replace(group, limits=replace(group.limits, host_write=host_write, schedule_conservativeness=0.1))
        for group in FLEETS[fleet]
    )
    world = drained(Plan(groups))
    served = world.measure.served
    totals = [server.replica.totals for server in world.servers]
    prompts = sum(s.prompt_tokens for s in served)
    assert sum(t.prompt_tokens for t in totals) == prompts
    assert sum(t.cached_tokens + t.prefill_tokens - t.refill_tokens for t in totals) == prompts
    assert sum(t.cached_tokens for t in totals) == sum(s.cached_tokens for s in served)
    # Where two replicas worked on a request, both count its first output token.
    handed = sum(t.finished for t in totals) - len(served)
    assert sum(t.output_tokens for t in totals) == sum(s.output_tokens for s in served) + handed
    assert (handed > 0) == (len({group.role for group in groups}) > 1)
    to = [server.id for server in world.servers if server.replica.totals.transferred_tokens]
    assert to == [server.id for server in world.servers if server.group.role in (Role.WARM, Role.DECODE)]


def test_every_prompt_token_is_found_or_regretted_or_new() -> None:
    """Without forks, what is new depends on the sessions alone, but for who computes the common system prompt first."""
    system = 12_000
    calm = Plan(synthetic=Synthetic(system_tokens=system, turns=6.0, forks=NO_FORKS))
    new, regretted = {}, {}
    for policy in ("round_robin", "rendezvous"):
        served = drained(calm, policy=policy).measure.served
        regretted[policy] = sum(s.elsewhere_tokens for s in served)
        known = sum(s.cached_tokens + s.evicted_tokens for s in served) + regretted[policy]
        new[policy] = sum(s.prompt_tokens for s in served) - known
    assert new["round_robin"] == pytest.approx(new["rendezvous"], abs=3 * system)
    assert regretted["rendezvous"] <= 3 * system
    assert regretted["round_robin"] > new["round_robin"] / 2


def test_what_a_dead_replica_would_have_computed_again_is_not_told_of_the_one_that_had_it() -> None:
    groups = (Group(1, TIMES, LIMITS, "a"), Group(1, TIMES, LIMITS, "b"))
    calm = Synthetic(turns=9.0, first_sigma=0.0, forks=NO_FORKS)
    world = build(Plan(groups, 1, True, calm), seed=3, policy="round_robin")
    served = world.measure.served
    while len(served) < 2 or not served[1].elsewhere_tokens:
        world.run(world.engine.now + 0.01)
    second = served[1]
    assert second.first_token is None
    world.crash(5.0, "b" if second.replica == "b001" else "a")
    world.run(world.engine.now + 30.0)
    assert second.tries == 2
    assert second.cached_tokens > 0.9 * second.prompt_tokens
    assert second.elsewhere_tokens == second.evicted_tokens == 0


def test_sessions_are_the_same_for_every_policy() -> None:
    asked = []
    for policy in ("round_robin", "rendezvous"):
        world = drained(Plan(), policy=policy)
        asked.append({s.name: (s.prompt_tokens, s.output_tokens, s.main) for s in world.measure.served})
    assert asked[0] == asked[1]


def test_an_idle_replica_that_holds_all_serves_in_the_ideal_time() -> None:
    """One session alone on one replica without a break of its prefix has no excess."""
    alone = Plan((Group(1, TIMES, LIMITS),), live=1, stay=True, synthetic=Synthetic(turns=20.0, forks=NO_FORKS))
    world = drained(alone)
    assert len({s.name.split("#")[0] for s in world.measure.served}) == 1
    for s in world.measure.served:
        assert s.first_token is not None
        assert s.first_token - s.arrived == pytest.approx(s.ideal_s)


def test_reports_are_late_and_true() -> None:
    world = build(Plan(), policy="round_robin")
    ages = set()
    for step in range(1, 60):
        now = 10.0 + 0.7 * step
        world.run(now)
        for view in world.balancer.replicas.values():
            load = view.load
            assert isinstance(load, Load)
            assert load.capacity_tokens == 691_000
            assert load.host_capacity_tokens == 2_800_000
            ages.add(round(now - load.at, 3))
    assert min(ages) >= world.fleet.report_delay_s
    assert max(ages) <= world.fleet.report_delay_s + world.fleet.report_interval_s + 1e-6
    assert len(ages) > 10


def test_a_returned_replica_is_empty_and_known_to_be() -> None:
    world = build(Plan(events=EVENTS["crash"]))
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


def test_events_befall_the_group_that_is_named() -> None:
    world = build(Plan(FLEETS["two machines"]))
    world.run(30.0)
    world.crash(10.0, "old")
    world.slow_down(2.0, "old")
    world.scale_out(2, "old")
    world.scale_in(1, "new")
    assert [(s.id, s.up, s.leaving) for s in world.servers if not s.up or s.leaving or s.born] == [
        ("new000", True, True),
        ("old002", False, False),
        ("old004", True, False),
        ("old005", True, False),
    ]
    assert world.servers[3].replica.hardware is not world.servers[3].group.hardware
    with pytest.raises(ValueError, match="no group 'moon'; known: new, old"):
        world.crash(1.0, "moon")


@pytest.mark.parametrize(
    ("roles", "said"),
    [
        ((), "roles none; must be"),
        ((Role.PREFILL,), "roles prefill; must be unified alone, or prefill with decode, or warm with cold"),
        ((Role.UNIFIED, Role.COLD), "roles cold, unified"),
        ((Role.COLD, Role.DECODE), "or warm with cold, with decode or without"),
        ((Role.UNIFIED, Role.UNIFIED), "two groups are named 'r'"),
    ],
)
def test_groups_that_do_not_go_together_are_refused(roles: tuple[Role, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Fleet(tuple(Group(1, TIMES, LIMITS, role=role) for role in roles))


# Two replicas to a request


def test_the_policy_picks_the_prefill_replica_and_the_rest_is_decoded_elsewhere() -> None:
    world = drained(Plan(FLEETS["prefill and decode"]))
    prefill = [s for s in world.servers if s.group.role in PICKED]
    assert {s.replica for s in world.measure.served} == {s.id for s in prefill}
    assert set(world.balancer.replicas) == {s.id for s in prefill}
    assert all(s.replica.totals.decode_steps == 0 for s in prefill)
    decode = [s.replica.totals for s in world.servers if s.group.role is Role.DECODE]
    assert all(t.prefill_tokens == 0 and t.decode_steps > 0 for t in decode)


def test_the_first_token_waits_for_the_link() -> None:
    """A prompt of n tokens takes n * bytes / speed longer than on a replica that does both."""
    alone = Plan(live=1, stay=True, synthetic=Synthetic(turns=3.0, first_sigma=0.0, forks=NO_FORKS))
    slow = replace(alone, groups=FLEETS["prefill and decode"], link_bytes_per_s=1e9)
    both = [drained(plan, seed=3).measure.served[0] for plan in (alone, slow)]
    assert both[0].prompt_tokens == both[1].prompt_tokens
    waits = [s.first_token - s.arrived for s in both if s.first_token is not None]
    assert waits[1] - waits[0] == pytest.approx(both[0].prompt_tokens * 70_272 / 1e9)


@pytest.mark.parametrize("group", ["p", "d"])
def test_kv_that_was_on_the_way_when_either_end_died_is_computed_again(group: str) -> None:
    calm = Synthetic(turns=3.0, first_sigma=0.0, forks=NO_FORKS)
    world = build(Plan(FLEETS["prefill and decode"], 1, True, calm, link_bytes_per_s=1e9), seed=3)
    first = None
    while first is None or world.servers[0].replica.totals.finished + world.servers[1].replica.totals.finished == 0:
        world.run(world.engine.now + 0.1)
        first = next(iter(world.measure.served), None)
    assert first.first_token is None
    began = first.replica
    if group == "p" and began == "p001":
        world.servers[0].up = False  # so that it is the first that serves
    world.crash(5.0, group)
    if group == "p":
        world.servers[0].up = True
    world.run(world.engine.now + 60.0)
    assert first.tries == 2
    assert (first.replica == began) == (group == "d")
    assert first.finished is not None


def test_long_new_prompts_are_computed_apart_and_resident_where_the_policy_said() -> None:
    world = drained(Plan(FLEETS["warm and cold"], synthetic=Synthetic(turns=6.0, forks=NO_FORKS)))
    cold = world.servers[-1]
    assert set(world.balancer.replicas) == {s.id for s in world.servers[:-1]}
    assert cold.replica.totals.decode_steps == 0
    first = [s for s in world.measure.served if s.name.endswith("#0") and s.prompt_tokens > 40_000]
    later = [s for s in world.measure.served if not s.name.endswith("#0")]
    assert len(first) > 5
    assert cold.replica.totals.prompt_tokens >= sum(s.prompt_tokens for s in first)
    # What came from the cold replica is found by the turns that follow.
    assert sum(s.cached_tokens for s in later) > 0.85 * sum(s.prompt_tokens for s in later)


def test_with_three_pools_warm_ones_only_prefill_and_keep_what_cold_ones_computed() -> None:
    world = drained(Plan(FLEETS["warm, cold and decode"], synthetic=Synthetic(turns=6.0, forks=NO_FORKS)))
    totals = {role: [s.replica.totals for s in world.servers if s.group.role is role] for role in Role}
    assert all(t.decode_steps == 0 for t in totals[Role.WARM] + totals[Role.COLD])
    assert all(t.prefill_tokens == 0 and t.decode_steps > 0 for t in totals[Role.DECODE])
    # Every prompt reaches a decode replica once; long new ones have been to a warm one on their way.
    decoded = sum(s.prompt_tokens for s in world.measure.served if s.output_tokens > 1)
    assert sum(t.transferred_tokens for t in totals[Role.DECODE]) == decoded
    first = [s for s in world.measure.served if s.name.endswith("#0") and s.prompt_tokens > 40_000]
    assert sum(t.transferred_tokens for t in totals[Role.WARM]) >= sum(s.prompt_tokens for s in first) > 0
    later = [s for s in world.measure.served if not s.name.endswith("#0")]
    assert sum(s.cached_tokens for s in later) > 0.85 * sum(s.prompt_tokens for s in later)


# Clients that leave


@given(patience_s=st.floats(0.01, 3.0), fleet=st.sampled_from(sorted(FLEETS)))
@settings(max_examples=12)
def test_who_waits_too_long_leaves_and_nothing_stays_behind(patience_s: float, fleet: str) -> None:
    calm = Synthetic(turns=4.0, forks=NO_FORKS)
    world = drained(Plan(FLEETS[fleet], synthetic=calm, patience_s=patience_s))
    served = world.measure.served
    left = [s for s in served if s.left is not None]
    assert len(left) == world.measure.abandoned
    for s in served:
        if s.left is not None:
            assert s.first_token is None
            assert s.left - s.arrived == pytest.approx(patience_s)
        else:
            assert s.first_token is not None
            assert s.first_token - s.arrived <= patience_s + 1e-9
            assert s.finished is not None
    for server in world.servers:
        assert server.replica.idle
        assert (server.engaged, len(server.calls)) == (0, 0)
        assert server.replica.cache.pinned_pages == server.replica.cache.allocated_pages == 0
    for view in world.balancer.replicas.values():
        assert view.in_flight == 0


def test_some_leave_when_it_takes_long() -> None:
    world = drained(Plan(live=24, patience_s=0.5, synthetic=Synthetic(turns=6.0, forks=NO_FORKS)))
    assert 0 < world.measure.abandoned < len(world.measure.served)
    assert sum(server.replica.totals.aborted for server in world.servers) == world.measure.abandoned


# A full queue


def test_a_full_replica_turns_requests_away_and_none_is_lost() -> None:
    small = replace(LIMITS, max_running=1, max_queued=0)
    world = drained(Plan((Group(2, TIMES, small),), live=16))
    assert world.measure.refused > 0
    assert sum(server.replica.totals.rejected for server in world.servers) > 0
    assert all(s.finished is not None for s in world.measure.served)


# Several routers


def hits(routers: Routers, policy: str = "sticky", events: Events = ()) -> float:
    plan = Plan(routers=routers, events=events, synthetic=Synthetic(turns=12.0, forks=NO_FORKS))
    return float(str(result(plan, policy=policy)["hit_total"]))


def test_routers_that_share_keep_sessions_where_they_are_and_others_do_not() -> None:
    one = hits(Routers())
    shared, hashed, alone = (
        hits(routers)
        for routers in (
            Routers(4),
            Routers(4, Spread.BY_SESSION, Sharing.NONE),
            Routers(4, sharing=Sharing.NONE),
        )
    )
    assert shared == pytest.approx(one, abs=0.03)
    assert hashed == pytest.approx(one, abs=0.03)
    assert alone < one - 0.1


def test_a_new_router_reads_the_store_unless_that_is_lost() -> None:
    def unknown(event: Callable[[World], None]) -> int:
        """Sessions that no router knows afterwards, of those whose KV is there."""
        world = build(Plan(routers=Routers(3)), policy="sticky")
        world.run(60.0)
        known = [set(router.balancer.directory._sessions) for router in world.front.routers]
        event(world)
        return sum(
            len(before - set(r.balancer.directory._sessions))
            for before, r in zip(known, world.front.routers, strict=True)
        )

    assert unknown(lambda world: world.restart_router(1)) <= 1
    assert unknown(lambda world: world.lose_store()) > 30


def test_others_load_is_known_soon_after_it_changed() -> None:
    plan = Plan(routers=Routers(3, publish_s=0.2, share_delay_s=0.05))
    world = build(plan, policy="least_loaded")
    wrong = checked = 0
    for step in range(200):
        world.run(20.0 + 0.3 * step)
        for server in world.servers:
            truth = sum(r.balancer.replicas[server.id].in_flight for r in world.front.routers)
            for router in world.front.routers:
                view = router.balancer.replicas[server.id]
                checked += 1
                wrong += view.in_flight + view.others_running != truth
    assert checked == 200 * 4 * 3
    # What has changed in the last quarter of a second. Were a second message needed, it would be twice as much.
    assert wrong < 0.2 * checked


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"count": 0}, "count must be from 1 to 1000, got 0"),
        ({"share_delay_s": -1.0}, "share_delay_s must be 0 or more"),
        ({"publish_s": 0.0}, "publish_s must be 0.01 or more"),
    ],
)
def test_routers_that_cannot_be_are_refused(arguments: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Routers(**arguments)  # type: ignore[arg-type]
