"""Policies by name: what can be built, and errors that say what to change."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, asdict, fields, is_dataclass

import pytest

from policies.policy import Policy
from policies.random import Random
from policies.registry import POLICIES, make, parameters
from policies.session_affinity import SessionAffinity, SessionAffinityConfig


def test_the_policies_that_were_promised_are_there_the_default_first() -> None:
    assert next(iter(POLICIES)) == "session_affinity"
    assert set(POLICIES) == {
        "random",
        "round_robin",
        "least_loaded",
        "power_of_two",
        "consistent_hash",
        "rendezvous",
        "bounded_load",
        "prefix_aware",
        "sticky",
        "kv_cost",
        "weighted_score",
        "dual_choice",
        "session_affinity",
    }


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
    assert parameters("session_affinity") == asdict(SessionAffinityConfig())
    assert parameters("round_robin") == {}
    assert parameters("least_loaded") == {}


@pytest.mark.parametrize("name", POLICIES)
def test_a_configuration_is_a_frozen_dataclass_with_a_default_for_everything(name: str) -> None:
    config = make(name).config
    assert is_dataclass(config)
    assert {f.name: getattr(config, f.name) for f in fields(config)} == parameters(name)
    for parameter in parameters(name):
        with pytest.raises(FrozenInstanceError):
            setattr(config, parameter, None)


def test_given_parameters_arrive() -> None:
    policy = make("random", {"seed": 7})
    assert isinstance(policy, Random)
    assert policy.config.seed == 7
    assert policy.snapshot().parameters == {"seed": 7}


def test_a_whole_number_will_do_for_seconds() -> None:
    policy = make("session_affinity", {"hysteresis_s": 2})
    assert isinstance(policy, SessionAffinity)
    assert policy.config.hysteresis_s == 2.0
    assert type(policy.config.hysteresis_s) is float


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_no_parameter_may_be_nothing_or_infinite(name: str, value: float) -> None:
    for parameter, default in parameters(name).items():
        if isinstance(default, float):
            with pytest.raises(ValueError, match=f"{parameter} must be .*got {value}"):
                make(name, {parameter: value})


@pytest.mark.parametrize("build", [make, parameters])
def test_an_unknown_name_is_answered_with_the_known_ones(build: object) -> None:
    with pytest.raises(ValueError, match="unknown policy 'stick'") as error:
        build("stick")  # type: ignore[operator]
    for name in POLICIES:
        assert name in str(error.value)


@pytest.mark.parametrize(
    ("name", "given", "says"),
    [
        ("session_affinity", {"ties": 1.0}, ["session_affinity", "'ties'", "hysteresis_s", "theta_s"]),
        ("round_robin", {"seed": 1}, ["round_robin", "'seed'", "none"]),
        ("random", {"seed": "seven"}, ["random", "'seed'", "'seven'", "int"]),
        ("random", {"seed": 1.5}, ["'seed'", "1.5", "int"]),
        ("random", {"seed": True}, ["'seed'", "True", "int"]),
        ("random", {"seed": None}, ["'seed'", "None", "int"]),
        ("session_affinity", {"theta_s": "0.1"}, ["'theta_s'", "'0.1'", "float"]),
        ("session_affinity", {"theta_s": False}, ["'theta_s'", "False", "float"]),
        ("session_affinity", {"hysteresis_s": -0.1}, ["hysteresis_s", "-0.1", "0 or more"]),
        ("session_affinity", {"grace_s": float("nan")}, ["grace_s", "nan", "0 or more"]),
        ("session_affinity", {"rate_tau_s": 0.0}, ["rate_tau_s", "0.0", "seconds above 0"]),
    ],
)
def test_a_bad_parameter_is_named_with_its_value_and_the_remedy(
    name: str, given: dict[str, object], says: list[str]
) -> None:
    with pytest.raises(ValueError, match=next(iter(given))) as error:
        make(name, given)
    for word in says:
        assert word in str(error.value)
