"""Sessions, agents and parents from headers and named body fields."""

from __future__ import annotations

import gzip
import json
from hashlib import blake2b

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.identity import DEFAULT_RULES, BodyRule, HeaderRule, Identity, IdentityRules

RULES = IdentityRules(secret=b"of this test")
JSON = b"application/json"
CLAUDE = b"x-claude-code-session-id"
CLAUDE_AGENT = b"x-claude-code-agent-id"
CLAUDE_PARENT = b"x-claude-code-parent-agent-id"
CODEX_PARENT = b"x-codex-parent-thread-id"
HEADERS = [rule.header.encode() for rule in DEFAULT_RULES if isinstance(rule, HeaderRule)]
SAID = {"messages": [{"role": "user", "content": "hi"}]}


def key(value: bytes) -> bytes | None:
    return RULES.from_headers({b"x-session-affinity": value}).key


def of_body(body: object, rules: IdentityRules = RULES, **headers: bytes) -> Identity:
    known = {name.replace("_", "-").encode(): value for name, value in headers.items()}
    return rules.from_body(rules.from_headers(known), json.dumps(body).encode(), JSON)


# Headers


@pytest.mark.parametrize("header", HEADERS)
def test_every_session_header_gives_the_same_key_for_the_same_session(header: bytes) -> None:
    identity = RULES.from_headers({header: b"s-1"})
    assert identity == Identity(session=key(b"s-1"), key=key(b"s-1"), rule=header.decode())
    assert header in RULES.header_names


def test_digests_are_the_same_in_every_process_and_with_another_secret_others() -> None:
    keyed = blake2b(b"s-1", key=blake2b(b"of this test", digest_size=32).digest(), digest_size=16).digest()
    assert key(b"s-1") == keyed
    assert IdentityRules().from_headers({b"session-id": b"s-1"}).key == blake2b(b"s-1", digest_size=16).digest()
    assert IdentityRules(secret=b"x" * 1000).from_headers({b"session-id": b"s-1"}).key not in (keyed, None)


def test_no_rule_matches_nothing() -> None:
    assert RULES.from_headers({}) == Identity()
    assert Identity().rule == "none"


@given(st.lists(st.sampled_from(HEADERS), min_size=1, unique=True))
def test_the_first_rule_whose_header_is_there_decides(present: list[bytes]) -> None:
    identity = RULES.from_headers({name: b"value of " + name for name in present})
    first = min(present, key=HEADERS.index)
    assert identity.rule == first.decode()
    assert identity.session == key(b"value of " + first)


def test_the_order_is_the_configured_one() -> None:
    headers = {b"session-id": b"a", b"x-session-id": b"b"}
    for first, second, value in (("session-id", "x-session-id", b"a"), ("x-session-id", "session-id", b"b")):
        rules = IdentityRules([HeaderRule(first), HeaderRule(second)], b"of this test")
        assert rules.from_headers(headers).key == key(value)


@pytest.mark.parametrize("name", [b"x-client-request-id", b"x-request-id", b"x-correlation-id"])
def test_a_name_of_a_request_is_no_key(name: bytes) -> None:
    assert name not in RULES.header_names
    assert RULES.from_headers({name: b"r-1"}).key is None


@pytest.mark.parametrize("value", [b"", b"x" * 257, b"a\x00b", b"a\tb", b"a\x7fb", b"\r\n"])
def test_an_unusable_value_falls_to_the_next_rule(value: bytes) -> None:
    identity = RULES.from_headers({b"x-session-affinity": value, b"session-id": b"s-1"})
    assert (identity.rule, identity.key) == ("session-id", key(b"s-1"))
    assert RULES.from_headers({b"x-session-affinity": value}) == Identity()


def test_a_value_may_be_as_long_as_the_limit_and_need_not_be_text() -> None:
    assert RULES.from_headers({b"session-id": b"x" * 256}).key == key(b"x" * 256) is not None
    assert RULES.from_headers({b"session-id": b"\xff\xfe"}).key == key(b"\xff\xfe") is not None
    assert IdentityRules(max_value_bytes=3).from_headers({b"session-id": b"four"}).key is None
    with pytest.raises(ValueError, match="max_value_bytes must be at least 1, got 0"):
        IdentityRules(max_value_bytes=0)


# Agents and parents


def test_claudes_subagents_have_their_own_keys_and_name_their_parents() -> None:
    root = RULES.from_headers({CLAUDE: b"s"})
    child = RULES.from_headers({CLAUDE: b"s", CLAUDE_AGENT: b"a"})
    sibling = RULES.from_headers({CLAUDE: b"s", CLAUDE_AGENT: b"b"})
    nested = RULES.from_headers({CLAUDE: b"s", CLAUDE_AGENT: b"c", CLAUDE_PARENT: b"a"})
    assert (root.agent, root.parent, root.key) == (None, None, root.session)
    assert child.key == child.agent
    assert child.parent == sibling.parent == root.key
    assert nested.parent == child.key
    assert {root.session} == {child.session, sibling.session, nested.session}
    assert len({root.key, child.key, sibling.key, nested.key}) == 4


def test_an_agent_belongs_to_its_session() -> None:
    keys = {RULES.from_headers({CLAUDE: s, CLAUDE_AGENT: a}).key for s, a in ((b"s", b"a"), (b"t", b"a"), (b"sa", b""))}
    assert len(keys) == 3


def test_codexs_root_thread_is_the_session() -> None:
    root = RULES.from_headers({b"session-id": b"r", b"thread-id": b"r"})
    child = RULES.from_headers({b"session-id": b"r", b"thread-id": b"c", CODEX_PARENT: b"r"})
    nested = RULES.from_headers({b"session-id": b"r", b"thread-id": b"n", CODEX_PARENT: b"c"})
    assert root == Identity(session=key(b"r"), key=key(b"r"), rule="session-id")
    assert child.parent == root.key
    assert nested.parent == child.key == child.agent
    assert nested.session == root.session


@pytest.mark.parametrize("header", [b"x-session-affinity", b"x-opencode-session", b"x-session-id"])
def test_opencodes_subagent_is_a_session_whose_parent_is_one(header: bytes) -> None:
    identity = RULES.from_headers({header: b"child", b"x-parent-session-id": b"main"})
    assert (identity.session, identity.agent, identity.parent) == (key(b"child"), None, key(b"main"))
    assert identity.key == key(b"child")


def test_dynamos_parent() -> None:
    identity = RULES.from_headers({b"x-dynamo-session-id": b"child", b"x-dynamo-parent-session-id": b"main"})
    assert (identity.key, identity.parent) == (key(b"child"), key(b"main"))


@pytest.mark.parametrize(
    "headers",
    [
        {b"x-session-affinity": b"s", CLAUDE_AGENT: b"a"},
        {b"x-session-affinity": b"s", b"thread-id": b"t", CODEX_PARENT: b"p"},
        {b"modal-session-id": b"s", b"x-parent-session-id": b"p"},
        {CLAUDE: b"s", b"thread-id": b"t", b"x-parent-session-id": b"p"},
        {CLAUDE: b"s", CLAUDE_PARENT: b"a"},
        {b"session-id": b"s", CODEX_PARENT: b"p"},
        {b"session_id": b"s", b"thread-id": b"t"},
        {b"x-session-affinity": b"s", b"x-parent-session-id": b"s"},
        {b"x-session-affinity": b"s", b"x-parent-session-id": b"x" * 300},
        {CLAUDE: b"s", CLAUDE_AGENT: b""},
    ],
)
def test_what_belongs_to_another_rule_or_makes_no_sense_is_not_heeded(headers: dict[bytes, bytes]) -> None:
    identity = RULES.from_headers(headers)
    assert (identity.key, identity.agent, identity.parent) == (key(b"s"), None, None)


@pytest.mark.parametrize("parent", [b"", b"s", b"a", b"\x00", b"x" * 300])
def test_an_agent_with_no_usable_parent_is_the_sessions_child(parent: bytes) -> None:
    assert RULES.from_headers({CLAUDE: b"s", CLAUDE_AGENT: b"a", CLAUDE_PARENT: parent}).parent == key(b"s")


# Body fields


@pytest.mark.parametrize("rule", [rule for rule in DEFAULT_RULES if isinstance(rule, BodyRule)], ids=lambda r: r.name)
def test_a_body_field_names_the_session(rule: BodyRule) -> None:
    value = "s-1" if rule.scope == "session" else json.dumps({"session_id": "s-1"})
    outer, _, inner = rule.body.partition(".")
    identity = of_body({outer: {inner: value} if inner else value, "model": "m", "stream": False, **SAID})
    assert (identity.rule, identity.session, identity.key) == (rule.name, key(b"s-1"), key(b"s-1"))
    assert identity.fingerprint == 0


def test_headers_come_before_the_body_and_body_rules_in_their_order() -> None:
    assert of_body({"session_id": "b"}, x_session_id=b"h").rule == "x-session-id"
    assert of_body({"prompt_cache_key": "p", "session_id": "b"}).rule == "body:session_id"
    assert of_body({"user": "u", "prompt_cache_key": "p", **SAID}).rule == "body:prompt_cache_key"


@pytest.mark.parametrize("value", [None, 5, 1.5, True, [], ["s"], {}, {"id": "s"}, "", "x" * 257, "x" * 5000, "a\nb"])
@pytest.mark.parametrize("field", ["metadata", "session_id", "session_params", "model", "messages", "input", "system"])
def test_an_odd_field_does_not_cost_the_others(field: str, value: object) -> None:
    body = {"model": "m", "stream": True, "prompt_cache_key": "p", field: value}
    identity = of_body(body)
    if (field, value) == ("session_params", {"id": "s"}):
        assert identity.rule == "body:session_params.id"
        return
    assert (identity.rule, identity.key) == ("body:prompt_cache_key", key(b"p"))


@pytest.mark.parametrize(
    ("user_id", "session"),
    [
        ('{"device_id":"d","account_uuid":"","session_id":"s-1"}', b"s-1"),
        ("user_0a1b_account_11aa_session_s-1", b"s-1"),
        ("user_0a1b_account__session_s-1", b"s-1"),
    ],
)
def test_claude_code_wraps_its_session_in_the_user_id(user_id: str, session: bytes) -> None:
    assert of_body({"metadata": {"user_id": user_id}}).key == key(session)


@pytest.mark.parametrize(
    "name", ["alice", "42", '{"device_id":"d"}', '{"session_id":7}', "{not json", "_session_", "my_session_1"]
)
def test_an_end_user_is_no_session_but_narrows_the_conversation(name: str) -> None:
    plain, named = of_body(SAID), of_body({"metadata": {"user_id": name}, **SAID})
    assert named.session is None
    assert named.rule == "body:metadata.user_id"
    assert named.key not in (None, plain.key, key(name.encode()))
    assert named.key == of_body({**SAID, "metadata": {"user_id": name}}).key
    assert named.key != of_body({"metadata": {"user_id": name}, "messages": [{"role": "user", "content": "ho"}]}).key
    assert named.key != of_body({"metadata": {"user_id": name + "x"}, **SAID}).key


def test_of_two_names_of_the_end_user_the_first_rules_counts() -> None:
    named = of_body({"metadata": {"user_id": "alice"}, **SAID})
    assert of_body({"user": "bob", "metadata": {"user_id": "alice"}, **SAID}) == named


def test_an_end_user_without_a_conversation_is_nothing_to_hold_on_to() -> None:
    assert of_body({"user": "alice"}) == Identity()


def test_the_answer_before_is_no_session() -> None:
    identity = of_body({"previous_response_id": "resp_1", **SAID})
    assert identity.rule == "fingerprint"
    assert identity.key == of_body({"previous_response_id": "resp_2", **SAID}).key


@pytest.mark.parametrize(
    "headers", [{"authorization": b"Bearer b"}, {"x_api_key": b"a"}, {"api_key": b"a"}, {"authorization": b""}]
)
def test_a_conversation_belongs_to_its_credential(headers: dict[str, bytes]) -> None:
    mine = of_body(SAID, authorization=b"Bearer a")
    assert mine.key not in (None, of_body(SAID, **headers).key)
    assert mine.fingerprint == of_body(SAID, **headers).fingerprint
    assert of_body(SAID, authorization=b"", x_api_key=b"a").key == of_body(SAID, x_api_key=b"a").key
    assert "Bearer" not in repr(mine)


def test_a_conversation_belongs_to_its_model() -> None:
    assert of_body({"model": "a", **SAID}).key != of_body({"model": "b", **SAID}).key
    assert of_body({"model": "a", **SAID}).fingerprint == of_body({"model": "b", **SAID}).fingerprint


def test_a_named_session_is_the_same_for_all_credentials_and_models() -> None:
    assert of_body({"model": "a", "session_id": "s"}, authorization=b"Bearer a").key == key(b"s")


def test_a_key_from_the_headers_stays_when_the_body_is_looked_at() -> None:
    identity = RULES.from_headers({CLAUDE: b"s", CLAUDE_AGENT: b"a"})
    agent = identity.agent
    body = json.dumps({"session_id": "other", "model": "m", **SAID}).encode()
    RULES.from_body(identity, body, JSON, want_fingerprint=True)
    assert (identity.key, identity.session, identity.rule) == (agent, key(b"s"), CLAUDE.decode())
    assert identity.fingerprint
    assert RULES.from_body(RULES.from_headers({CLAUDE: b"s"}), body, JSON).fingerprint == 0


# Bodies that tell nothing


@pytest.mark.parametrize("coding", [b"gzip", b"zstd", b"GZIP"])
def test_a_compressed_body_is_not_looked_at(coding: bytes) -> None:
    body = json.dumps({"session_id": "s"}).encode()
    identity = RULES.from_headers({b"content-encoding": coding})
    assert RULES.from_body(identity, body, JSON, want_fingerprint=True).key is None
    assert RULES.from_body(RULES.from_headers({b"content-encoding": b"identity"}), body, JSON).key == key(b"s")


@pytest.mark.parametrize(
    ("content_type", "looked_at"),
    [
        (b"application/json; charset=utf-8", True),
        (b"Application/JSON", True),
        (b"application/vnd.api+json", True),
        (b"", True),
        (b"multipart/form-data; boundary=x", False),
        (b"text/plain", False),
    ],
)
def test_only_json_is_looked_at(content_type: bytes, looked_at: bool) -> None:
    identity = RULES.from_body(Identity(), b'{"session_id": "s"}', content_type)
    assert identity.key == (key(b"s") if looked_at else None)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"7",
        b"[{}]",
        b'{"session_id": "s"',
        b'{"session_id": "s"} trailing',
        b'{"session_id": "\xff"}',
        b'{"metadata": {"user_id": "\xff"}}',
        gzip.compress(b'{"session_id": "s"}', mtime=0),
        b'{"session_id": "s", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"metadata": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
        b'{"session_id": "s", "x": "' + b"x" * (16 << 20) + b'"}',
    ],
    ids=lambda body: repr(body[:24]),
)
def test_a_body_that_cannot_be_read_tells_nothing(body: bytes) -> None:
    assert RULES.from_body(Identity(), body, JSON, want_fingerprint=True) == Identity()


def test_of_two_equal_names_the_last_counts() -> None:
    assert RULES.from_body(Identity(), b'{"session_id": "a", "session_id": "b"}', JSON).key == key(b"b")


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_any_bytes_are_endured(body: bytes) -> None:
    RULES.from_body(Identity(), body, JSON, want_fingerprint=True)


_names = ["role", "content", "text", "type", "user_id", "session_id", "id", "image_url", "source", "other"]
_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(_names), inner, max_size=4),
    max_leaves=12,
)
_tops = ["model", "stream", "messages", "input", "system", "instructions", "prompt", "text", "input_ids", "metadata"]
_tops += ["session_id", "session_params", "user", "prompt_cache_key", "other"]


@given(st.dictionaries(st.sampled_from(_tops), _values), st.booleans())
def test_any_json_is_endured(body: dict[str, object], ascii_only: bool) -> None:
    text = json.dumps(body, ensure_ascii=ascii_only).encode(errors="surrogatepass")
    identity = RULES.from_body(Identity(), text, JSON, want_fingerprint=True)
    assert identity.key is None or len(identity.key) == 16
