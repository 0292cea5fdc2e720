"""Which fields name a session, in which order, and how configuration says so."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
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

    Raises ValueError with a line for each fault: entry and key, value, remedy.
    """
    rules: list[Rule] = []
    faults: list[str] = []
    for i, entry in enumerate(config):
        where = f"identity.rules.{i}"
        found = list(_faults(where, entry))
        if not found:
            rule = _rule(entry)
            if any(rule.name == other.name for other in rules):
                found = [f"{where}: {rule.name!r} has a rule already: remove one of the two"]
            rules.append(rule)
        faults += found
    if faults:
        raise ValueError("\n".join(faults))
    return tuple(rules)


def _rule(entry: Mapping[str, object]) -> Rule:
    """Of an entry without faults."""
    given = {key: str(value) for key, value in entry.items() if value is not None}
    if "header" in entry:
        return HeaderRule(**{key: name.lower() for key, name in given.items()})
    return BodyRule(given["body"], "user" if given.get("scope") == "user" else "session")


def _faults(where: str, entry: object) -> Iterator[str]:
    if not isinstance(entry, Mapping):
        yield f"{where}: expected a mapping such as {{header: x-session-id}}, got {entry!r}"
    elif ("header" in entry) == ("body" in entry):
        yield f"{where}: set either `header` or `body`, and not both; got {dict(entry)!r}"
    else:
        of_header = "header" in entry
        allowed = ("header", "agent", "parent") if of_header else ("body", "scope")
        for key, value in entry.items():
            if key not in allowed:
                yield f"{where}.{key}: unknown key, set to {value!r}: use {', '.join(allowed)}"
            elif fault := (_header_fault if of_header else _body_fault)(key, value):
                yield f"{where}.{key}: {fault}"


def _header_fault(key: str, value: object) -> str | None:
    if value is None and key != "header":
        return None
    name = value.lower() if isinstance(value, str) else ""
    if not _HEADER_NAME.fullmatch(name):
        return f"expected a header name such as x-session-id, got {value!r}"
    if name in NEVER_HEADERS:
        return f"{value!r} changes with every request: name a header that does not"
    return None


def _body_fault(key: str, value: object) -> str | None:
    if key == "scope":
        return None if value in ("session", "user") else f"expected session or user, got {value!r}"
    if not isinstance(value, str) or not 1 <= len(value.split(".")) <= 2 or not all(value.split(".")):
        return f"expected a field such as session_id or metadata.user_id, got {value!r}"
    if value in NEVER_FIELDS:
        return f"{value!r} changes with every turn: name a field that does not"
    if value.split(".")[0] in PROMPT_FIELDS:
        return f"{value!r} is the prompt or the model, not a name: use another field"
    return None
