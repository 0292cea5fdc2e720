"""Which fields name a session, in which order, and how configuration says so."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Scope = Literal["session", "user"]

NEVER_HEADERS = frozenset({"x-client-request-id", "x-request-id", "x-correlation-id"})
"""Per request in at least one client: as a key they would scatter a session over all replicas."""

NEVER_FIELDS = frozenset({"previous_response_id"})
"""Names the answer before, so it is another in every turn."""

PROMPT_FIELDS = frozenset(
    {"model", "stream", "messages", "system", "instructions", "input", "prompt", "text", "input_ids"}
)
"""Read for the conversation's fingerprint."""

_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9a-z-]+")
"""A lower-case token of RFC 9110, section 5.6.2."""


@dataclass(frozen=True, slots=True)
class HeaderRule:
    """A header that names the session, by lower-case name."""

    header: str
    agent: str | None = None
    """Header that names the agent or thread inside the session; equal to the session's value, it is the root's."""
    parent: str | None = None
    """Header that names the parent: an agent of the same session when the rule has `agent`, else a session."""

    @property
    def name(self) -> str:
        return self.header


@dataclass(frozen=True, slots=True)
class BodyRule:
    """A field of the JSON body, `name` or `object.name`, that holds a string."""

    body: str
    scope: Scope = "session"
    """`user`: a value in which Claude Code wrapped its session is that session; any other names an end user."""

    @property
    def name(self) -> str:
        return f"body:{self.body}"


Rule = HeaderRule | BodyRule

_PARENT = "x-parent-session-id"

DEFAULT_RULES: tuple[Rule, ...] = (
    # Set for a router's sake
    HeaderRule("modal-session-id"),
    HeaderRule("modal-routing-affinity-key"),
    HeaderRule("x-smg-routing-key"),
    HeaderRule("x-dynamo-session-id", parent="x-dynamo-parent-session-id"),
    HeaderRule("x-session-affinity", parent=_PARENT),  # OpenCode, pi, Crush, LangChain; Cloudflare's, Fireworks'
    # Coding agents' own
    HeaderRule("x-opencode-session", parent=_PARENT),  # to OpenCode's own providers; pi, Cline and Hermes there, too
    HeaderRule("x-claude-code-session-id", agent="x-claude-code-agent-id", parent="x-claude-code-parent-agent-id"),
    HeaderRule("x-session-id", parent=_PARENT),
    HeaderRule("session-id", agent="thread-id", parent="x-codex-parent-thread-id"),  # Codex; pi without threads
    HeaderRule("session_id"),  # older Codex, pi, Cline, Roo Code
    HeaderRule("conversation_id"),  # older Codex
    HeaderRule("x-grok-conv-id"),
    HeaderRule("x-goose-session-id"),
    HeaderRule("x-task-id"),  # Cline
    HeaderRule("x-roo-task-id"),
    HeaderRule("x-affinity"),  # pi to Mistral
    # Gateways' and the wider groups: a trajectory may hold several sessions
    HeaderRule("x-litellm-session-id"),  # OpenHands
    HeaderRule("x-bf-session-id"),
    HeaderRule("x-multi-turn-session-id"),
    # Bodies
    BodyRule("metadata.user_id", "user"),  # Claude Code
    BodyRule("metadata.session_id"),
    BodyRule("metadata.sessionId"),  # Qwen Code to DashScope
    BodyRule("session_id"),
    BodyRule("session_params.session_id"),
    BodyRule("session_params.id"),  # SGLang's own sessions
    BodyRule("conversation_id"),
    BodyRule("prompt_cache_key"),  # Codex, OpenCode, Kimi, Qwen Code, OpenHands
    BodyRule("promptCacheKey"),  # OpenCode through the AI SDK's openai-compatible provider
    BodyRule("user", "user"),
)
"""The first rule whose field holds a usable value decides; headers come before the body whatever the order here.

Why this order: what is set for a router's sake is meant for us. Agents that send several names send the same value
in each, but where a name is common to many (`session-id`, `x-session-id`) the agent's own name goes first, because
its rule knows the agent's subagents. Sources: the vendors' documentation and our own captures of real agents
(tests/router/captures/clients).
"""


def parse_rules(config: Sequence[Mapping[str, object]]) -> tuple[Rule, ...]:
    """Rules from configuration: `{header, agent?, parent?}` or `{body, scope?}` each.

    Raises ValueError naming the entry, the key, the value and the remedy.
    """
    rules: list[Rule] = []
    for i, entry in enumerate(config):
        where = f"identity.rules[{i}]"
        if not isinstance(entry, Mapping):
            raise ValueError(f"{where}: expected a mapping such as {{header: x-session-id}}, got {entry!r}")
        if ("header" in entry) == ("body" in entry):
            raise ValueError(f"{where}: set either `header` or `body`, and not both; got {dict(entry)!r}")
        rule = _header_rule(where, entry) if "header" in entry else _body_rule(where, entry)
        if any(rule.name == other.name for other in rules):
            raise ValueError(f"{where}: {rule.name!r} has a rule already: remove one of the two")
        rules.append(rule)
    return tuple(rules)


def _known(where: str, entry: Mapping[str, object], allowed: tuple[str, ...]) -> None:
    for key in entry:
        if key not in allowed:
            raise ValueError(f"{where}.{key}: unknown key, set to {entry[key]!r}: use {', '.join(allowed)}")


def _header_rule(where: str, entry: Mapping[str, object]) -> HeaderRule:
    _known(where, entry, ("header", "agent", "parent"))
    names: dict[str, str] = {}
    for key, value in entry.items():
        if value is None and key != "header":
            continue
        name = value.lower() if isinstance(value, str) else ""
        if not _HEADER_NAME.fullmatch(name):
            raise ValueError(f"{where}.{key}: expected a header name such as x-session-id, got {value!r}")
        if name in NEVER_HEADERS:
            raise ValueError(f"{where}.{key}: {value!r} changes with every request: name a header that does not")
        names[key] = name
    return HeaderRule(**names)


def _body_rule(where: str, entry: Mapping[str, object]) -> BodyRule:
    _known(where, entry, ("body", "scope"))
    path, scope = entry["body"], entry.get("scope", "session")
    if not isinstance(path, str) or not 1 <= len(path.split(".")) <= 2 or not all(path.split(".")):
        raise ValueError(f"{where}.body: expected a field such as session_id or metadata.user_id, got {path!r}")
    if path in NEVER_FIELDS:
        raise ValueError(f"{where}.body: {path!r} changes with every turn: name a field that does not")
    if path.split(".")[0] in PROMPT_FIELDS:
        raise ValueError(f"{where}.body: {path!r} is the prompt or the model, not a name: use another field")
    if scope == "session" or scope == "user":
        return BodyRule(path, scope)
    raise ValueError(f"{where}.scope: expected session or user, got {scope!r}")
