"""What every policy owes, whichever it is: each test runs over the whole registry."""

from __future__ import annotations

import ast
import gc
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields, replace
from enum import Enum
from math import isfinite, isnan
from random import Random
from types import FunctionType, ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.balancer import Balancer, NoReplica
from policies.directory import Directory
from policies.events import (
    CacheCleared,
    Event,
    Finished,
    FirstToken,
    LoadReported,
    ReplicaAdded,
    ReplicaChanged,
    ReplicaRemoved,
    Routed,
)
from policies.lease import Lease
from policies.registry import POLICIES, make, parameters
from policies.types import Choice, Load, Outcome, Reason, Replica, Request, Resident, State, Usage
from router.catalogue import source_of
from tests.fakes.fleet import CLIENT_LEFT, DONE, fleet, turn

pytestmark = pytest.mark.parametrize("name", POLICIES)

_counts = st.none() | st.integers(0, 10**7)
_loads = st.none() | st.builds(
    Load,
    at=st.floats(0, 100),
    running=_counts,
    waiting=_counts,
    waiting_tokens=_counts,
    used_tokens=_counts,
    capacity_tokens=_counts,
    host_capacity_tokens=_counts,
    prefill_tokens_per_s=st.none() | st.floats(),
    own_running=st.integers(0, 100),
    own_tokens=st.integers(0, 10**6),
)
_replicas = st.lists(
    st.builds(
        Replica,
        id=st.text("abcdef:/.0123", min_size=1, max_size=8),
        weight=st.floats(-1, 100),
        in_flight=st.integers(0, 1000),
        prefill_tokens=st.integers(0, 10**9),
        pending_s=st.floats(0, 1e6),
        prefill_ends=st.floats(0, 1e6),
        since=st.floats(0, 50),
        load=_loads,
        others_running=st.integers(0, 1000),
        others_tokens=st.integers(0, 10**9),
        served=st.integers(0, 10**6),
        last_lease=st.integers(0, 10**6),
    ),
    min_size=1,
    max_size=6,
    unique_by=lambda r: r.id,
)


@st.composite
def _situations(draw: st.DrawFn) -> tuple[list[Replica], Request]:
    """Candidates in order of id, and a request as the Balancer would hand it over."""
    replicas = sorted(draw(_replicas), key=lambda r: r.id)
    residents: list[Resident] = []
    for replica in draw(st.lists(st.sampled_from(replicas), max_size=4, unique_by=id)):
        tokens = draw(st.integers(1, 10**7))
        residents.append(Resident(replica, tokens, draw(st.integers(0, tokens)), draw(st.booleans())))
    residents.sort(key=lambda resident: not resident.own)
    key = draw(st.none() | st.binary(max_size=16))
    request = Request(
        key=key,
        parent=draw(st.none() | st.binary(max_size=16)),
        fingerprint=draw(st.integers(0, 2**64 - 1)),
        prompt_tokens=draw(st.integers(0, 10**9)),
        blocks=tuple(draw(st.lists(st.integers(0, 2**64 - 1), max_size=3))),
        residents=tuple(residents) if key is not None else (),
        known=key is not None and (bool(residents) or draw(st.booleans())),
        lost=key is not None and draw(st.booleans()),
        concurrent=key is not None and draw(st.booleans()),
        last_home=draw(st.none() | st.sampled_from(replicas)) if key is not None and not residents else None,
        once_tokens=draw(st.integers(0, 10**9)) if key is not None else 0,
    )
    return replicas, request


def _plain(replica: Replica) -> list[object]:
    """All that is known of a replica, as values that can be compared."""
    values: list[object] = [
        getattr(replica, f.name) for f in fields(replica) if f.name not in ("load", "speed", "cache")
    ]
    speed, cache = replica.speed, replica.cache
    values += [replace(replica.load) if replica.load is not None else None]
    values += [speed.factor, speed.decode, speed.prefills, speed.decodes]
    return [*values, len(cache), cache.held_tokens, cache.capacity, cache.scale, cache.live(50.0)]


@given(_situations())
@settings(max_examples=60)
def test_a_choice_is_sound_whatever_is_known_or_missing(name: str, situation: tuple[list[Replica], Request]) -> None:
    replicas, request = situation
    before = (replace(request), [_plain(r) for r in replicas])
    choice = make(name).pick(request, tuple(replicas), 50.0)
    assert any(choice.replica is r for r in replicas)
    assert choice.reason in set(Reason)
    assert choice.wait_s >= 0.0
    assert not isnan(choice.wait_s)
    assert choice.prefill_s >= 0.0
    assert not isnan(choice.prefill_s)
    assert 0 <= choice.resident_tokens <= max(request.prompt_tokens, 0)
    assert request == before[0], "pick must not change the request"
    assert [_plain(r) for r in replicas] == before[1], "pick must not change a replica"


@given(_situations())
@settings(max_examples=60)
def test_a_pick_learns_nothing(name: str, situation: tuple[list[Replica], Request]) -> None:
    replicas, request = situation
    policy = make(name)
    first = policy.pick(request, replicas, 50.0)
    policy.pick(Request(key=b"someone else", prompt_tokens=9), replicas[:1], 50.0)
    again = policy.pick(request, replicas, 50.0)
    assert again.replica is first.replica
    assert (again.reason, again.wait_s, again.resident_tokens) == (first.reason, first.wait_s, first.resident_tokens)


@given(_situations())
@settings(max_examples=60)
def test_an_explanation_is_of_what_would_be_picked(name: str, situation: tuple[list[Replica], Request]) -> None:
    replicas, request = situation
    before = (replace(request), [_plain(r) for r in replicas])
    policy = make(name)
    picked = policy.pick(request, replicas, 50.0)
    explained = policy.explain(request, replicas, 50.0)
    assert explained.replica is picked.replica
    for name_ in ("reason", "wait_s", "resident_tokens", "prefill_s"):
        assert getattr(explained, name_) == getattr(picked, name_)
    assert policy.pick(request, replicas, 50.0).replica is picked.replica
    assert (request, [_plain(r) for r in replicas]) == before
    if explained.candidates:
        assert any(candidate.replica is explained.replica for candidate in explained.candidates)
        assert len({id(candidate.replica) for candidate in explained.candidates}) == len(explained.candidates)
        for candidate in explained.candidates:
            assert any(candidate.replica is r for r in replicas)
            assert not isnan(candidate.cost)
            assert not any(isnan(term) for term in candidate.terms.values())
            if candidate.replica is explained.replica and candidate.replica.weight > 1e-300:
                assert isfinite(candidate.cost), "infinite is what may not be chosen"


@pytest.mark.parametrize(
    "request_",
    [
        Request(),
        Request(prompt_tokens=0, fingerprint=5),
        Request(key=b""),
        Request(key=b"k", prompt_tokens=0),
        Request(key=b"k", known=True),
        Request(key=b"k", parent=b"p", prompt_tokens=10**9),
    ],
    ids=["nothing", "no key", "empty key", "no tokens", "known, no home", "huge"],
)
@pytest.mark.parametrize("load", [None, Load(at=0.0), Load(at=-1e9)], ids=["no load", "empty load", "ancient load"])
def test_one_candidate_is_taken_however_little_is_known(name: str, request_: Request, load: Load | None) -> None:
    only = Replica("a", load=load)
    assert make(name).pick(request_, [only], 0.0).replica is only


# Whole histories


PLACED = tuple(state for state in State if state is not State.FINISHING)
"""States under which every choice is a policy's: a session that a replica finishes stays without asking one."""


def _history(
    balancer: Balancer, seed: int, asides: bool = False, steps: int = 400, states: Sequence[State] = tuple(State)
) -> Iterator[tuple[str, Reason]]:
    """Drive a Balancer through a life of its own; gives each choice made. `asides` asks for explanations between."""
    random, now = Random(seed), 0.0
    leases: list[Lease] = []
    names = "abcdef"
    for _ in range(steps):
        now += random.expovariate(2.0)
        roll, replica_id = random.random(), random.choice(names)
        replica = balancer.replicas.get(replica_id)
        if roll < 0.06:
            balancer.join(Replica(replica_id, weight=random.choice([0.5, 1.0, 2.0])), now)
        elif roll < 0.08 and replica is not None:
            balancer.leave(replica_id, now)
        elif roll < 0.13 and replica is not None:
            balancer.set_state(replica, random.choice(states), now)
        elif roll < 0.20 and replica is not None:
            balancer.report(
                replica,
                Load(
                    at=now,
                    running=random.randrange(9),
                    waiting=random.randrange(3),
                    waiting_tokens=random.choice([None, random.randrange(90_000)]),
                    capacity_tokens=random.choice([None, 200_000]),
                    host_capacity_tokens=random.choice([None, 400_000]),
                ),
                now,
            )
        elif roll < 0.22 and replica is not None:
            balancer.cache_cleared(replica, now)
        elif roll < 0.45 and leases:
            lease = leases.pop(random.randrange(len(leases)))
            lease.first_token(now)
            if random.random() < 0.8:
                prompt = random.randrange(50_000)
                lease.finish(DONE, Usage(prompt, random.choice([None, 0, prompt // 2]), 100), now)
            else:
                lease.finish(CLIENT_LEFT, None, now)
        else:
            key = random.choice([None, b"r", b"s", b"t", b"u", b"v", b"w", b"x", b"y", b"z"])
            print_ = random.randrange(3)
            tokens = random.randrange(60_000)
            blocks = tuple(1000 * print_ + n for n in range(tokens // 1024)) if random.random() < 0.5 else ()
            request = Request(key, random.choice([None, b"r"]), print_, tokens, blocks)
            if random.random() < 0.1:
                request.failed = balancer.ready[:1]
            if asides:
                for n in range(3):
                    _explain(balancer, Request(key=b"%d" % n), now)
                    _explain(balancer, Request(key=b"%d" % n, failed=balancer.ready[1:2]), now)
                    _explain(balancer, replace(request), now)
            try:
                lease = balancer.acquire(request, now)
            except NoReplica:
                continue
            leases.append(lease)
            yield lease.replica.id, lease.choice.reason


def _explain(balancer: Balancer, request: Request, now: float) -> Choice | None:
    try:
        return balancer.explain(request, now)
    except NoReplica:
        return None


def test_the_same_events_give_the_same_choices(name: str) -> None:
    one, other = (list(_history(fleet(make(name)), seed=3)) for _ in range(2))
    assert len(one) > 100
    assert len({replica for replica, _ in one}) > 1
    assert one == other


def test_asking_for_explanations_changes_nothing_that_follows(name: str) -> None:
    silent = list(_history(fleet(make(name)), seed=4))
    assert silent == list(_history(fleet(make(name)), seed=4, asides=True))


def test_asked_as_a_shadow_it_changes_nothing_that_follows(name: str) -> None:
    plain = [list(_history(fleet(make(before)), seed=8, steps=200, states=PLACED)) for before in POLICIES]
    for before, expected in zip(POLICIES, plain, strict=True):
        balancer = fleet(make(before))
        balancer.run_shadow(make(name), 0.0)
        assert list(_history(balancer, seed=8, steps=200, states=PLACED)) == expected
        assert sum(balancer.disagreements.values()) == len(expected)
        assert before != name or all(same for _, _, same in balancer.disagreements), "it agrees with itself"


def test_the_smallest_directory_changes_no_promise(name: str) -> None:
    """With room for one session, nearly all is forgotten; every choice is still made."""
    full = list(_history(fleet(make(name)), seed=5, states=PLACED))
    cramped = list(_history(fleet(make(name), directory=Directory(max_sessions=1)), seed=5, states=PLACED))
    assert len(cramped) == len(full)


def test_a_replica_that_left_is_never_chosen_again(name: str) -> None:
    balancer = fleet(make(name), "abcd")
    keys = [None, *(b"%d" % n for n in range(40))]
    for n, key in enumerate(keys):
        turn(balancer, Request(key=key), 1.0 + n)
    gone = balancer.leave("b", 100.0)
    heard = [turn(balancer, Request(key=key), 101.0 + n).replica for n, key in enumerate(keys * 2)]
    assert gone not in heard
    assert {r.id for r in heard} == {"a", "c", "d"}


def test_a_replica_that_returns_under_its_id_is_the_new_one(name: str) -> None:
    balancer = fleet(make(name), "ab")
    for n in range(20):
        turn(balancer, Request(key=b"%d" % n), 1.0 + n)
    old = balancer.replicas["a"]
    balancer.join(Replica("a"), 50.0)
    heard = [turn(balancer, Request(key=b"new %d" % n), 51.0 + n).replica for n in range(40)]
    assert old not in heard
    assert balancer.replicas["a"] in heard


def test_a_policy_put_in_charge_late_serves_at_once(name: str) -> None:
    for before in POLICIES:
        balancer = fleet(make(before))
        lease = balancer.acquire(Request(key=b"k"), 1.0)
        balancer.switch(make(name), 2.0)
        lease.finish(DONE, Usage(100, 0, 10), 3.0)  # of a request it never saw
        assert turn(balancer, Request(key=b"k"), 4.0).replica in balancer.ready


def test_events_it_has_no_use_for_are_borne(name: str) -> None:
    policy, replica, request = make(name), Replica("a"), Request(key=b"k")
    stranger = Replica("never seen")
    events: list[Event] = [
        FirstToken(1.0, request, stranger, 0.5),
        Finished(1.0, request, stranger, DONE, None),
        ReplicaRemoved(1.0, stranger),
        ReplicaChanged(1.0, stranger, State.READY),
        LoadReported(1.0, stranger, Load(at=1.0)),
        CacheCleared(1.0, stranger),
        ReplicaAdded(1.0, replica),
        ReplicaAdded(1.0, replica),
        Routed(1.0, request, Choice(replica, Reason.NEW)),
    ]
    for event in events:
        policy.observe(event)
    assert policy.pick(request, [replica], 2.0).replica is replica


# Removal

STAYS = ("session_affinity", "dual_choice", "sticky", "prefix_aware", "bounded_load", "rendezvous", "consistent_hash")
"""Policies that promise that, with no load to speak of, a session stays where it is."""


def test_removal_moves_only_what_it_must(name: str) -> None:
    if name not in STAYS:
        pytest.skip("promises nothing of the kind")
    balancer = fleet(make(name), "abcdefgh")
    random = Random(9)
    homes: dict[bytes, Replica] = {}
    requests: dict[bytes, Request] = {}
    for n in range(160):
        key, tokens = b"%d" % n, random.randrange(5_000, 40_000)
        blocks = tuple(1_000_000 * n + i for i in range(tokens // 1024))
        requests[key] = Request(key, None, n + 1, tokens, blocks)
        homes[key] = turn(balancer, replace(requests[key]), 10.0 * n, prompt=tokens).replica
    if name == "prefix_aware":  # by load alone, one at a time, sessions take turns
        assert len(set(homes.values())) == 8
    gone = balancer.leave("c", 2_000.0)
    assert 0 < sum(home is gone for home in homes.values()) < 80
    for n, (key, home) in enumerate(homes.items()):
        choice = balancer.explain(replace(requests[key]), 2_001.0 + n)
        assert (choice.replica is home) is (home is not gone)


# What it remembers

_SMALL: dict[str, dict[str, object]] = {
    "sticky": {"max_sessions": 200},
    "prefix_aware": {"max_tree_size": 4096 * 500},
    "kv_cost": {"router_max_tree_size": 500},
    "weighted_score": {"lru_capacity_per_server": 32_000},
}
"""Bounds that are soon reached."""


def _size(root: object) -> int:
    """Bytes of all that is reached from it, replicas and code left out."""
    seen: dict[int, object] = {}
    todo = [root]
    while todo:
        item = todo.pop()
        if id(item) in seen or isinstance(item, type | FunctionType | ModuleType | Replica | Outcome | Enum):
            continue
        seen[id(item)] = item
        todo += gc.get_referents(item)
    return sum(sys.getsizeof(item) for item in seen.values())


def test_what_it_remembers_is_bounded(name: str) -> None:
    balancer = fleet(make(name, _SMALL.get(name)), "abcd", directory=Directory(max_sessions=200))

    def live(first: int, sessions: int) -> None:
        for n in range(first, first + sessions):
            blocks = tuple(1_000 * n + i for i in range(20))
            turn(balancer, Request(b"%016d" % n, None, n, 20_000, blocks), 2.0 * n, prompt=20_000)

    live(0, 1_500)
    before = _size(balancer.policy)
    live(1_500, 1_500)
    assert _size(balancer.policy) <= 1.1 * before + 2_000
    assert len(balancer.directory) == 200
    for replica_id in "abc":
        balancer.leave(replica_id, 7_000.0)
    assert _size(balancer.policy) <= before


def test_a_fleet_that_comes_and_goes_leaves_nothing_behind(name: str) -> None:
    balancer = fleet(make(name), "", directory=Directory(max_sessions=50))

    def churn(first: int, times: int) -> None:
        for n in range(first, first + times):
            for replica_id in "abc":
                balancer.join(Replica(replica_id), 10.0 * n)
            for i in range(3):
                key = b"%d" % i
                turn(balancer, Request(key, None, i + 1, 5_000, (i, i + 1, i + 2, i + 3)), 10.0 * n + i)

    churn(0, 50)
    before = _size(balancer.policy)
    churn(50, 200)
    assert _size(balancer.policy) <= 1.1 * before + 2_000


# What it shows


def test_its_snapshot_can_be_sent_as_json(name: str) -> None:
    balancer = fleet(make(name))
    assert list(_history(balancer, seed=6))
    snapshot = balancer.policy.snapshot()
    assert json.loads(json.dumps(asdict(snapshot), allow_nan=False)) == asdict(snapshot)
    assert snapshot.policy == name


def test_its_snapshot_shows_every_parameter(name: str) -> None:
    assert make(name).snapshot().parameters == parameters(name)


def test_it_says_what_it_is(name: str) -> None:
    # From the source: a compiled class has no text at run time.
    source = source_of(POLICIES[name].__module__)
    classes = {each.name: each for each in source.body if isinstance(each, ast.ClassDef)}
    assert ast.get_docstring(classes[POLICIES[name].__name__])
    assert POLICIES[name].name == name
