"""What can be written under `pools`, what of it matches which model, and what is said of what cannot be."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.configuration import ConfigError, load
from router.pools import Pools
from router.settings import ModelsSettings, Settings

TWO = "pools: [{name: large, models: [glm]}, {name: small, models: ['*haiku*']}]\n"


def loaded(tmp_path: Path, text: str) -> Settings:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    return load(str(file))


def pools(**given: list[str]) -> Pools:
    return Pools([ModelsSettings(name=name, models=models) for name, models in given.items()])


def test_each_source_may_name_its_pool(tmp_path: Path) -> None:
    text = """
replicas: ["http://a:1", {url: "http://b:1", pool: small}]
discovery:
  dns: [{name: x, pool: small}]
  kubernetes: [{service: s, pool: large}]
"""
    settings = loaded(tmp_path, TWO + text)
    assert [each.pool for each in settings.replicas] == ["", "small"]
    assert [each.pool for each in (*settings.discovery.dns, *settings.discovery.kubernetes)] == ["small", "large"]


def test_they_can_be_given_by_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARMROUTE_POOLS", '[{"name": "large"}, {"name": "small", "models": ["m"]}]')
    monkeypatch.setenv("WARMROUTE_REPLICAS", '[{"url": "http://a:1", "pool": "small"}]')
    settings = load()
    assert Pools(settings.pools).names == ("large", "small")
    assert settings.replicas[0].pool == "small"


BAD = {
    "replicas: [{url: 'http://a:1', pool: x}]": "replicas.0.pool: 'x' is no pool, as there are none: name it under",
    TWO + "replicas: [{url: 'http://a:1', pool: smal}]": "replicas.0.pool: 'smal' is no pool: did you mean 'small'?",
    TWO + "discovery: {dns: [{name: x, pool: other}]}": "discovery.dns.0.pool: 'other' is no pool: name one of large",
    TWO
    + "discovery: {kubernetes: [{service: x, pool: larg}]}": "discovery.kubernetes.0.pool: 'larg' is no pool: did you",
    "pools: [{name: a}, {name: a}]": "pools.1.name: 'a' is given twice: give each pool its own",
    "pools: [{name: a, models: [M*]}, {name: b, models: [m*]}]": "pools.1.models: 'm*' is a pattern of pool a already",
    "pools: [{name: a, models: [m, m]}]": "pools.0.models: 'm' is a pattern of pool a already: remove one",
    "pools: [{name: ''}]": "pools.0: name '' is none for a pool",
    "pools: [{name: a b}]": "pools.0: name 'a b' is none for a pool: use up to 63 letters",
    "pools: [{models: [m]}]": "pools.0.name: is missing: set it",
    "pools: [{name: a, models: m}]": "pools.0.models: expected a list",
    "pools: [{name: a, models: ['']}]": "pools.0: models: '' is no pattern: write a model's name",
    "pools: [{name: a, model: [m]}]": "pools.0.model: unknown key, set to ['m']: did you mean 'pools.0.models'?",
    "pools: {a: [m]}": "pools: expected a list",
    f"pools: [{', '.join(f'{{name: p{n}}}' for n in range(101))}]": "pools: takes at most 100 items, not 101, got [",
}


@pytest.mark.parametrize("text", BAD)
def test_what_is_wrong_is_told_with_its_remedy(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        loaded(tmp_path, text)
    assert BAD[text] in str(refused.value)


def test_every_wrong_member_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        loaded(tmp_path, TWO + "replicas: [{url: 'http://a:1', pool: x}, {url: 'http://b:1', pool: y}]")
    assert [line.split(":")[0] for line in str(refused.value).splitlines()] == ["replicas.0.pool", "replicas.1.pool"]


@pytest.mark.parametrize(
    ("model", "pool"),
    [
        ("claude-haiku-4-5", "small"),
        ("Claude-HAIKU", "small"),
        ("glm-haiku", ""),
        ("glm", ""),
        ("unknown", ""),
        ("", ""),
        ("abc", "exact"),
        ("abcd", ""),
        ("aXb", "wild"),
        ("ab", "wild"),
        ("a", ""),
    ],
)
def test_the_first_pool_with_a_pattern_for_a_model_has_it(model: str, pool: str) -> None:
    made = pools(large=["glm*"], small=["*haiku*"], exact=["abc"], wild=["a*b"])
    assert made.of_model(model) == pool


@given(st.text("ab*", min_size=1, max_size=8), st.text("abAB\n", max_size=10))
def test_patterns_are_those_of_shells_with_stars_alone(pattern: str, model: str) -> None:
    made = pools(first=[], second=[pattern])
    assert (made.of_model(model) == "second") is fnmatchcase(model.lower(), pattern)


def test_the_core_knows_the_first_by_no_name() -> None:
    made = pools(large=[], small=[])
    assert [made.core(name) for name in ("", "large", "small")] == ["", "", "small"]
    assert [made.shown(name) for name in ("", "small")] == ["large", "small"]
    assert made.of_header(b" small ") == "small"
    assert made.of_header(b"large") == ""
    assert made.of_header(b"Small") is None
    assert made.of_header(b"\xff") is None
    assert pools(only=["m"]).shown("") == ""
    assert not Pools().several
