"""Policies by name: what can be built, and errors that say what to change."""

from __future__ import annotations

import pytest

from policies.policy import Policy
from policies.random import Random
from policies.registry import POLICIES, make, parameters
from policies.session_affinity import SessionAffinity


def test_the_policies_of_the_first_release_are_there() -> None:
    assert set(POLICIES) >= {"round_robin", "random", "least_loaded", "rendezvous", "session_affinity"}


@pytest.mark.parametrize("name", POLICIES)
def test_each_name_builds_its_own_policy(name: str) -> None:
    policy = make(name)
    assert type(policy) is POLICIES[name]
    assert policy.name == name
    assert isinstance(policy, Policy)


@pytest.mark.parametrize("name", POLICIES)
def test_defaults_given_explicitly_build_the_same(name: str) -> None:
    assert make(name, parameters(name)).snapshot() == make(name).snapshot()


@pytest.mark.parametrize("name", POLICIES)
def test_two_policies_share_nothing(name: str) -> None:
    assert make(name) is not make(name)


def test_parameters_are_listed_with_their_defaults() -> None:
    assert parameters("random") == {"seed": 0}
    assert parameters("session_affinity") == {"tie_s": SessionAffinity().tie_s}
    assert parameters("round_robin") == {}
    assert parameters("least_loaded") == {}


def test_given_parameters_arrive() -> None:
    policy = make("random", {"seed": 7})
    assert isinstance(policy, Random)
    assert policy.seed == 7


def test_a_whole_number_will_do_for_seconds() -> None:
    policy = make("session_affinity", {"tie_s": 2})
    assert isinstance(policy, SessionAffinity)
    assert policy.tie_s == 2.0
    assert type(policy.tie_s) is float


@pytest.mark.parametrize("build", [make, parameters])
def test_an_unknown_name_is_answered_with_the_known_ones(build: object) -> None:
    with pytest.raises(ValueError, match="unknown policy 'sticky'") as error:
        build("sticky")  # type: ignore[operator]
    for name in POLICIES:
        assert name in str(error.value)


@pytest.mark.parametrize(
    ("name", "given", "says"),
    [
        ("session_affinity", {"ties": 1.0}, ["session_affinity", "'ties'", "tie_s"]),
        ("round_robin", {"seed": 1}, ["round_robin", "'seed'", "none"]),
        ("random", {"seed": "seven"}, ["random", "'seed'", "'seven'", "int"]),
        ("random", {"seed": 1.5}, ["'seed'", "1.5", "int"]),
        ("random", {"seed": True}, ["'seed'", "True", "int"]),
        ("random", {"seed": None}, ["'seed'", "None", "int"]),
        ("session_affinity", {"tie_s": "0.1"}, ["'tie_s'", "'0.1'", "float"]),
        ("session_affinity", {"tie_s": False}, ["'tie_s'", "False", "float"]),
        ("session_affinity", {"tie_s": -0.1}, ["tie_s", "-0.1", "0 seconds or more"]),
        ("session_affinity", {"tie_s": float("nan")}, ["tie_s", "nan", "0 seconds or more"]),
    ],
)
def test_a_bad_parameter_is_named_with_its_value_and_the_remedy(
    name: str, given: dict[str, object], says: list[str]
) -> None:
    with pytest.raises(ValueError, match=next(iter(given))) as error:
        make(name, given)
    for word in says:
        assert word in str(error.value)
