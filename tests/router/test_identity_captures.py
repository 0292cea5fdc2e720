"""What the rules make of real agents' requests (captures/clients/README.md)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from router.identity import Identity, IdentityRules

CAPTURES = Path(__file__).with_name("captures") / "clients"
RULES = IdentityRules(secret=b"of this test")
BODY_FIELDS = ("prompt_cache_key", "promptCacheKey", "metadata")


def _whole(value: Any) -> Any:
    """The recorded value with a text in place of each summary: of its length, and another for another digest."""
    if isinstance(value, dict):
        if "_sha1" in value:
            length = value["_str_len"]
            return (value["_sha1"] * (length // len(value["_sha1"]) + 1))[:length]
        return {name: _whole(inner) for name, inner in value.items()}
    return [_whole(inner) for inner in value] if isinstance(value, list) else value


def seen(name: str, *, headers: bool = True, fields: bool = True) -> list[Identity]:
    """The identity of each request of a capture, numbered from 1 as there (the first entry is a filler).

    Without `headers` all but the credential are lost on the way; without `fields` the body's names are, too.
    """
    found = [Identity()]
    for line in (CAPTURES / f"{name}.jsonl").read_text().splitlines():
        request = json.loads(line)
        sent = {field.lower().encode(): value.encode() for field, value in request["headers"]}
        known = {field: value for field, value in sent.items() if field in RULES.header_names}
        if not headers:
            known = {field: value for field, value in known.items() if field in (b"authorization", b"x-api-key")}
        body = {field: value for field, value in request["body"].items() if fields or field not in BODY_FIELDS}
        identity = RULES.from_headers(known)
        found.append(
            RULES.from_body(identity, json.dumps(_whole(body)).encode(), sent[b"content-type"], want_fingerprint=True)
        )
        assert found[-1].fingerprint
    return found


def groups(found: list[Identity]) -> list[list[int]]:
    """Numbers of the requests that share a key, in order of arrival."""
    by_key: dict[bytes | None, list[int]] = {}
    for number, identity in enumerate(found[1:], 1):
        assert identity.key is not None
        by_key.setdefault(identity.key, []).append(number)
    return list(by_key.values())


def branches(found: list[Identity]) -> list[list[int]]:
    """Numbers of the requests that share a fingerprint."""
    by_fingerprint: dict[int, list[int]] = {}
    for number, identity in enumerate(found[1:], 1):
        by_fingerprint.setdefault(identity.fingerprint, []).append(number)
    return list(by_fingerprint.values())


def rules(found: list[Identity]) -> set[str]:
    return {identity.rule for identity in found[1:]}


CLAUDE, CODEX, OPENCODE = "x-claude-code-session-id", "session-id", "x-session-affinity"
AFFINITY = "x-session-affinity"


@pytest.mark.parametrize(
    ("name", "rule", "keys", "conversations"),
    [
        # A fork by the user is a new session with the old conversation.
        ("claude.cont", CLAUDE, [[1, 2], [3]], [[1, 2, 3]]),
        ("claude.cut", CLAUDE, [[1, 2]], [[1, 2]]),
        ("claude.auth", CLAUDE, [[1]], [[1]]),
        # The billing block differs with the prompt and is no part of the conversation; here the prompt differs as well.
        ("claude.attrA", CLAUDE, [[1], [2], [3]], [[1, 3], [2]]),
        ("claude.sub", CLAUDE, [[1, 2, 4], [3]], [[1, 2, 4], [3]]),
        ("claude.hint", CLAUDE, [[1, 2, 3, 6], [4], [5]], [[1, 2, 3, 6], [4], [5]]),
        ("codex.cont", CODEX, [[1, 2], [3]], [[1, 2, 3]]),
        ("codex.fork", CODEX, [[1, 2], [3]], [[1, 2], [3]]),
        ("codex.state", CODEX, [[1, 2, 3, 4]], [[1, 2, 3, 4]]),
        # The title call comes first, under the session's key: the fingerprint tells it from the main thread.
        ("opencode.cont", OPENCODE, [[1, 2, 3], [4], [5, 6]], [[1], [2, 3, 4], [5], [6]]),
        ("opencode.cut", OPENCODE, [[1, 2, 3]], [[1], [2, 3]]),
        ("opencode.sub", OPENCODE, [[1, 2, 4], [3]], [[1], [2, 4], [3]]),
        ("ocanthropic.ok", OPENCODE, [[1, 2]], [[1], [2]]),
        ("occk.ok", OPENCODE, [[1, 2]], [[1], [2]]),
        ("ocopenai.ok", OPENCODE, [[1, 2]], [[1], [2]]),
        ("piaff.cont", AFFINITY, [[1, 2], [3]], [[1, 2, 3]]),
        ("piaff.cut", AFFINITY, [[1, 2]], [[1, 2]]),
        ("piaff.tool", AFFINITY, [[1, 2]], [[1, 2]]),
        ("pianthaff.ok", AFFINITY, [[1]], [[1]]),
        ("piresp.ok", "session-id", [[1]], [[1]]),
        # These send nothing: the conversation is the session, and a fork stays in it.
        ("pi.ok", "fingerprint", [[1]], [[1]]),
        ("pianth.ok", "fingerprint", [[1]], [[1]]),
        # 2: the memory extraction that Qwen Code runs after a turn, with a system prompt of its own.
        ("qwen.ok", "fingerprint", [[1], [2]], [[1], [2]]),
        ("qwen.cut", "fingerprint", [[1, 2], [3]], [[1, 2], [3]]),
        ("qwen.sub", "fingerprint", [[1, 2, 4], [3]], [[1, 2, 4], [3]]),
    ],
)
def test_requests_are_grouped(name: str, rule: str, keys: list[list[int]], conversations: list[list[int]]) -> None:
    found = seen(name)
    assert rules(found) == {rule}
    assert groups(found) == keys
    assert branches(found) == conversations


@pytest.mark.parametrize(
    ("name", "main", "children"),
    [("claude.sub", 1, [3]), ("claude.hint", 1, [4, 5]), ("codex.fork", 1, [3]), ("opencode.sub", 1, [3])],
)
def test_a_subagent_names_the_main_threads_key_as_its_parent(name: str, main: int, children: list[int]) -> None:
    found = seen(name)
    for number, identity in enumerate(found[1:], 1):
        assert identity.parent == (found[main].key if number in children else None)


@pytest.mark.parametrize("name", ["claude.sub", "codex.fork"])
def test_a_subagent_of_these_is_an_agent_of_the_same_session(name: str) -> None:
    found = seen(name)
    assert found[1].agent is None
    assert found[3].session == found[1].session == found[1].key
    assert found[3].agent == found[3].key


def test_a_subagent_of_opencode_is_a_session() -> None:
    found = seen("opencode.sub")
    assert found[3].agent is None
    assert found[3].session == found[3].key != found[1].session


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("claude.cont", "body:metadata.user_id"),
        ("codex.cont", "body:prompt_cache_key"),
        ("piresp.ok", "body:prompt_cache_key"),
    ],
)
def test_a_session_keeps_its_key_when_its_headers_are_lost(name: str, rule: str) -> None:
    without = seen(name, headers=False)
    assert rules(without) == {rule}
    assert [identity.key for identity in without] == [identity.key for identity in seen(name)]


@pytest.mark.parametrize(
    ("name", "rule"), [("occk.ok", "body:promptCacheKey"), ("ocopenai.ok", "body:prompt_cache_key")]
)
def test_opencode_without_headers_names_its_main_thread_only(name: str, rule: str) -> None:
    found, without = seen(name), seen(name, headers=False)
    assert [identity.rule for identity in without[1:]] == ["fingerprint", rule]
    assert without[2].key == found[2].key
    assert without[1].key != found[1].key


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("claude.sub", [[1, 2, 4], [3]]),
        ("codex.fork", [[1, 2], [3]]),
        ("opencode.cont", [[1], [2, 3, 4], [5], [6]]),
        ("opencode.sub", [[1], [2, 4], [3]]),
        ("piaff.cont", [[1, 2, 3]]),
    ],
)
def test_with_nothing_but_the_conversation_turns_still_stay_together(name: str, keys: list[list[int]]) -> None:
    found = seen(name, headers=False, fields=False)
    assert rules(found) == {"fingerprint"}
    assert groups(found) == keys


def test_sessions_of_two_agents_share_nothing() -> None:
    keys = [{identity.key for identity in seen(path.stem)[1:]} for path in sorted(CAPTURES.glob("*.jsonl"))]
    assert len(set.union(*keys)) == sum(map(len, keys))
