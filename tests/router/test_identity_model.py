"""The model in a body: found wherever it stands, and never mistaken for what a message says."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.identity import DEFAULT_RULES, IdentityRules, model_of
from router.identity.body import MAX_BODY_BYTES, MAX_VALUES

LONG = "y" * 5_000

_texts = st.sampled_from(["model", "", '"model": "x"', '\\"model\\":\\"x\\"}', LONG, "a\\", "é", '{"model":"x"}'])
_keys = st.sampled_from(["model", "messages", "tools", 'a"model', "n\\", "stream", LONG]) | st.text(max_size=5)
_values: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | _texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_keys, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(_keys, _values, max_size=6), st.sampled_from([None, 2]), st.booleans())
def test_it_is_the_one_that_a_parser_finds(body: dict[str, Any], indent: int | None, ascii: bool) -> None:
    expected = body.get("model")
    sent = json.dumps(body, indent=indent, ensure_ascii=ascii).encode("utf-8", "replace")
    found = model_of(sent)
    assert found == (expected if isinstance(expected, str) and len(expected) <= 4000 else None) or (
        isinstance(expected, str) and len(expected) > 4000  # too long for a name, wherever it stands
    )


@given(st.binary(max_size=60) | st.text('{}"model: ,x\\', max_size=40).map(str.encode))
def test_no_bytes_raise(body: bytes) -> None:
    model_of(body)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b'"model"',
        b'{"model": null}',
        b'{"model": 7, "x": "model"}',
        b'{"messages": [{"model": "x"}]}',
        b'{"a": {"model": "x"}}',
        b'{"a": "\\"model\\": \\"x\\""}',
        b'{"a": "b\\"model", "c": "x"}',
        b'{"mo\\u0064e": "x"}',
        b"\xff",
    ],
)
def test_what_is_none(body: bytes) -> None:
    assert model_of(body) is None


def test_an_escaped_name_or_value_is_read_as_json_has_it() -> None:
    assert model_of(b'{"mo\\u0064el": "x"}') == "x"
    assert model_of(b'{"model": "org\\/x"}') == "org/x"


def test_a_body_that_is_too_large_is_looked_at_where_it_begins_and_ends() -> None:
    filler = b'"%b"' % (b"x" * MAX_BODY_BYTES)
    assert model_of(b'{"model": "m", "messages": %b}' % filler) == "m"
    assert model_of(b'{"messages": %b, "model": "m", "stream": true}' % filler) == "m"
    assert model_of(b'{"messages": %b, "model": "m", "z": [1]}' % filler) is None


def test_a_body_of_more_values_than_is_read_is_looked_at_where_it_begins_and_ends() -> None:
    many = b"0," * MAX_VALUES + b"0"
    assert model_of(b'{"messages": [%b], "model": "m", "z": [1]}' % many[: MAX_VALUES // 2 * 2 - 1]) == "m"
    assert model_of(b'{"messages": [%b], "model": "m", "z": [1]}' % many) is None
    assert model_of(b'{"messages": [%b], "model": "m"}' % many) == "m"


def test_keys_of_two_pools_are_never_equal_and_those_of_the_first_are_what_they_were() -> None:
    rules = IdentityRules(DEFAULT_RULES, b"secret")
    headers = {b"x-claude-code-session-id": b"s", b"x-claude-code-agent-id": b"a"}
    plain = rules.from_headers(headers)
    again, small, other = (rules.from_headers(headers, pool=pool) for pool in (b"", b"small", b"smal"))
    assert again == plain
    for name in ("session", "agent", "key", "parent"):
        assert len({getattr(each, name) for each in (plain, small, other)}) == 3
    assert rules.digest_of("s") == plain.session
    assert rules.digest_of("s", pool=b"small") == small.session
    body = json.dumps({"messages": [{"role": "user", "content": "hello"}]}).encode()
    keys = {rules.from_body(rules.from_headers({}, pool=pool), body, b"").key for pool in (b"", b"small", b"smal")}
    assert len(keys) == 3
    assert rules.from_headers({}, pool=b"small").key is None
