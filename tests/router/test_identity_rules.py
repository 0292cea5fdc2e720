"""Rules as configuration writes them."""

from __future__ import annotations

from typing import Any

import pytest

from router.identity import DEFAULT_RULES, BodyRule, HeaderRule, parse_rules


def test_rules_are_read() -> None:
    assert parse_rules(
        [
            {"header": "Modal-Session-Id"},
            {"header": "session-id", "agent": "Thread-Id", "parent": "x-codex-parent-thread-id"},
            {"header": "x-session-id", "agent": None, "parent": "x-parent-session-id"},
            {"body": "prompt_cache_key"},
            {"body": "metadata.user_id", "scope": "user"},
        ]
    ) == (
        HeaderRule("modal-session-id"),
        HeaderRule("session-id", "thread-id", "x-codex-parent-thread-id"),
        HeaderRule("x-session-id", None, "x-parent-session-id"),
        BodyRule("prompt_cache_key"),
        BodyRule("metadata.user_id", "user"),
    )
    assert parse_rules([]) == ()


def test_the_default_can_be_written_as_configuration() -> None:
    config: list[dict[str, object]] = [
        {"header": rule.header, "agent": rule.agent, "parent": rule.parent}
        if isinstance(rule, HeaderRule)
        else {"body": rule.body, "scope": rule.scope}
        for rule in DEFAULT_RULES
    ]
    assert parse_rules(config) == DEFAULT_RULES


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("x-session-id", ["expected a mapping", "header: x-session-id", "'x-session-id'"]),
        ({}, ["`header` or `body`"]),
        ({"header": "a", "body": "b"}, ["not both", "'a'"]),
        ({"header": "a", "agnet": "b"}, [".agnet", "'b'", "header, agent, parent"]),
        ({"header": "a", "scope": "user"}, [".scope", "header, agent, parent"]),
        ({"body": "a", "agent": "b"}, [".agent", "body, scope"]),
        ({"header": ""}, [".header", "''"]),
        ({"header": None}, [".header", "None"]),
        ({"header": "two words"}, [".header", "'two words'"]),
        ({"header": "x-session-id\n"}, [".header"]),
        ({"header": "a", "agent": 7}, [".agent", "7"]),
        ({"header": "X-Client-Request-Id"}, [".header", "'X-Client-Request-Id'", "every request"]),
        ({"header": "x-correlation-id"}, ["every request"]),
        ({"header": "a", "agent": "x-request-id"}, [".agent", "every request"]),
        ({"body": ""}, [".body", "''"]),
        ({"body": 3}, [".body", "3"]),
        ({"body": "a.b.c"}, [".body", "'a.b.c'"]),
        ({"body": "a."}, [".body", "'a.'"]),
        ({"body": "previous_response_id"}, [".body", "every turn"]),
        ({"body": "messages"}, [".body", "the prompt"]),
        ({"body": "text.format"}, [".body", "the prompt"]),
        ({"body": "user", "scope": "agent"}, [".scope", "'agent'", "session or user"]),
    ],
)
def test_a_bad_rule_is_refused_with_its_place_its_value_and_a_remedy(entry: Any, said: list[str]) -> None:
    with pytest.raises(ValueError, match=r"^identity\.rules\.1") as refused:
        parse_rules([{"header": "fine"}, entry])
    for part in said:
        assert part in str(refused.value)


@pytest.mark.parametrize(
    "rules", [[{"header": "a"}, {"header": "A", "agent": "b"}], [{"body": "a"}, {"body": "a", "scope": "user"}]]
)
def test_a_field_has_one_rule(rules: list[dict[str, object]]) -> None:
    with pytest.raises(ValueError, match=r"identity\.rules\.1: .*already"):
        parse_rules(rules)


def test_all_faults_are_told_at_once() -> None:
    rules = [{"header": "a b", "agnet": "c"}, {"header": "fine"}, {"body": "messages", "scope": "agent"}, {}]
    with pytest.raises(ValueError) as refused:  # noqa: PT011 - what it says is what is looked at
        parse_rules(rules)
    places = [line.partition(": ")[0] for line in str(refused.value).splitlines()]
    assert places == [f"identity.rules.{place}" for place in ("0.header", "0.agnet", "2.body", "2.scope", "3")]
