"""What every policy owes, whichever it is: each test runs over the whole registry."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from math import isnan
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.balancer import Balancer, Lease, NoReplica
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
from policies.registry import POLICIES, make, parameters
from policies.types import Choice, Load, Reason, Replica, Request, Resident, State, Usage
from tests.fakes.fleet import CLIENT_LEFT, DONE, fleet, turn

pytestmark = pytest.mark.parametrize("name", POLICIES)

_counts = st.none() | st.integers(0, 10**7)
_loads = st.none() | st.builds(
    Load,
    at=st.floats(0, 100),
    running=_counts,
    waiting=_counts,
    waiting_tokens=_counts,
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
        load=_loads,
        served=st.integers(0, 10**6),
    ),
    min_size=1,
    max_size=6,
    unique_by=lambda r: r.id,
)


@st.composite
def _situations(draw: st.DrawFn) -> tuple[list[Replica], Request]:
    """Candidates in order of id, and a request as the Balancer would hand it over."""
    replicas = sorted(draw(_replicas), key=lambda r: r.id)
    residents = draw(
        st.lists(
            st.builds(Resident, st.sampled_from(replicas), st.integers(0, 10**7), st.booleans()),
            max_size=4,
        )
    )
    key = draw(st.none() | st.binary(max_size=16))
    request = Request(
        key=key,
        parent=draw(st.none() | st.binary(max_size=16)),
        fingerprint=draw(st.integers(0, 2**64 - 1)),
        prompt_tokens=draw(st.integers(0, 10**9)),
        blocks=tuple(draw(st.lists(st.integers(0, 2**64 - 1), max_size=3))),
        residents=tuple(residents) if key is not None else (),
        known=key is not None and (bool(residents) or draw(st.booleans())),
    )
    return replicas, request


@given(_situations())
@settings(max_examples=60, deadline=None)
def test_a_choice_is_sound_whatever_is_known_or_missing(name: str, situation: tuple[list[Replica], Request]) -> None:
    replicas, request = situation
    before = (replace(request), [replace(r) for r in replicas])
    choice = make(name).pick(request, tuple(replicas), 50.0)
    assert any(choice.replica is r for r in replicas)
    assert choice.reason in set(Reason)
    assert choice.wait_s >= 0.0
    assert not isnan(choice.wait_s)
    assert 0 <= choice.resident_tokens <= max(request.prompt_tokens, 0)
    assert request == before[0], "pick must not change the request"
    assert [asdict(r) for r in replicas] == [asdict(r) for r in before[1]], "pick must not change a replica"


@given(_situations())
@settings(max_examples=60, deadline=None)
def test_a_pick_learns_nothing(name: str, situation: tuple[list[Replica], Request]) -> None:
    replicas, request = situation
    policy = make(name)
    first = policy.pick(request, replicas, 50.0)
    policy.pick(Request(key=b"someone else", prompt_tokens=9), replicas[:1], 50.0)
    again = policy.pick(request, replicas, 50.0)
    assert again.replica is first.replica
    assert (again.reason, again.wait_s, again.resident_tokens) == (first.reason, first.wait_s, first.resident_tokens)


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


def _history(balancer: Balancer, seed: int, asides: bool = False, steps: int = 400) -> Iterator[tuple[str, Reason]]:
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
            balancer.set_state(replica, random.choice(list(State)), now)
        elif roll < 0.20 and replica is not None:
            balancer.report(replica, Load(at=now, running=random.randrange(9), waiting=random.randrange(3)), now)
        elif roll < 0.22 and replica is not None:
            balancer.cache_cleared(replica, now)
        elif roll < 0.45 and leases:
            lease = leases.pop(random.randrange(len(leases)))
            lease.first_token(now)
            if random.random() < 0.8:
                lease.finish(DONE, Usage(random.randrange(50_000), None, 100), now)
            else:
                lease.finish(CLIENT_LEFT, None, now)
        else:
            key = random.choice([None, b"r", b"s", b"t", b"u", b"v", b"w", b"x", b"y", b"z"])
            request = Request(key=key, fingerprint=random.randrange(3), prompt_tokens=random.randrange(60_000))
            if asides:
                for n in range(3):
                    _explain(balancer, Request(key=b"%d" % n), now)
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


def test_the_smallest_directory_changes_no_promise(name: str) -> None:
    """With room for one session, nearly all is forgotten; every choice is still made."""
    full = list(_history(fleet(make(name)), seed=5))
    cramped = list(_history(fleet(make(name), directory=Directory(max_sessions=1)), seed=5))
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
    assert POLICIES[name].__doc__
    assert POLICIES[name].name == name
