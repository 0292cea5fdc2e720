"""What is known of a request's origin, and the rules compiled to find it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import msgspec

from policies.responses import PREFIX
from router.identity.body import ERRORS, BodyReader, string
from router.identity.fingerprint import fingerprint
from router.identity.rules import DEFAULT_RULES, BodyRule, HeaderRule, Rule

DIGEST_BYTES = 16

CREDENTIALS = (b"authorization", b"x-api-key", b"api-key")
"""Headers that hold the client's credential: OpenAI's and most others', Anthropic's, Azure's."""
_ENCODING = b"content-encoding"
_CONTROLS = bytes(range(32)) + b"\x7f"
_NOBODY = bytes(DIGEST_BYTES)


@dataclass(slots=True)
class Identity:
    """Digests are of 16 bytes and equal on all routers that share a secret. Raw values are in none of them."""

    session: bytes | None = None
    """Of the session a header or a body field names."""
    agent: bytes | None = None
    """Of session and agent, when an agent other than the session's root is named."""
    parent: bytes | None = None
    """Key of the session or agent that spawned this one."""
    key: bytes | None = None
    """What affinity goes by: agent, else session, else derived from the fingerprint. None: nothing is known."""
    fingerprint: int = 0
    """Of the conversation's beginning, 64 bits; 0 when not looked at or not there. Not keyed: not for logs."""
    rule: str = "none"
    """Which rule gave the key: a header's name, `body:` and a field's path, `fingerprint` or `none`.

    For an end user's name it is that field's rule: the key is of the user and the conversation.
    """
    blocks: tuple[int, ...] = ()
    """Chained hashes of the raw body's blocks, when asked for."""
    credential: bytes = field(default=b"", repr=False)
    """As sent; only for `from_body`, never to be kept."""
    tenant: bytes = b""
    """Whose sessions these are, when the router asks for keys. Keys of two tenants are never equal."""
    pool: bytes = b""
    """Which pool of replicas it goes to; empty for the default one. Keys of two pools are never equal."""
    encoded: bool = False
    """The body is compressed: it is not looked at."""


class IdentityRules:
    """Rules compiled once. Its methods run once for every request, and never raise on what clients send.

    `secret` keys the digests, of any length; without one, who sees a digest can confirm a guess of its session.
    Values longer than `max_value_bytes`, empty, or with control characters count as absent.
    """

    def __init__(self, rules: Sequence[Rule] = DEFAULT_RULES, secret: bytes = b"", max_value_bytes: int = 256) -> None:
        if max_value_bytes < 1:
            raise ValueError(f"max_value_bytes must be at least 1, got {max_value_bytes}")
        self._max = max_value_bytes
        self._hash = blake2b(key=blake2b(secret, digest_size=32).digest() if secret else b"", digest_size=DIGEST_BYTES)
        headers = [rule for rule in rules if isinstance(rule, HeaderRule)]
        self._headers = [
            (r.header.encode(), (r.agent or "").encode(), (r.parent or "").encode(), r.name) for r in headers
        ]
        self._body = [rule for rule in rules if isinstance(rule, BodyRule)]
        self._reader = BodyReader([rule.body for rule in self._body])
        used = {name for *names, _ in self._headers for name in names if name}
        self.header_names: frozenset[bytes] = frozenset({*used, *CREDENTIALS, _ENCODING})
        """Lower-case names of the headers that `from_headers` reads."""

    def from_headers(self, headers: Mapping[bytes, bytes], tenant: bytes = b"", pool: bytes = b"") -> Identity:
        """What the headers tell. `headers`: at least those of `header_names`, by lower-case name.

        `tenant`: whose they are, where that has been proven. One tenant cannot name a session of another's, and a
        tenant's new credential leaves its sessions where they are.

        `pool`: the pool that it goes to, empty for the default one. The same session in another is another.
        """
        get = headers.get
        identity = Identity()
        if tenant:
            identity.tenant = identity.credential = tenant
        else:
            for name in CREDENTIALS:
                if credential := get(name):
                    identity.credential = credential
                    break
        identity.encoded = _is_encoded(headers)
        for header, agent_header, parent_header, rule in self._headers:
            value = get(header)
            if value is None or not self._usable(value):
                continue
            identity.rule = rule
            identity.session = identity.key = self._digest(value, tenant)
            parent = get(parent_header, b"") if parent_header else b""
            if not agent_header:
                if parent and parent != value and self._usable(parent):
                    identity.parent = self._digest(parent, tenant)
                break
            agent = get(agent_header, b"")
            if agent != value and self._usable(agent):
                identity.agent = identity.key = self._digest(value + b"\x00" + agent, tenant)
                identity.parent = identity.session
                if parent not in (value, agent) and self._usable(parent):
                    identity.parent = self._digest(value + b"\x00" + parent, tenant)
            break
        if pool:
            identity.pool = pool
            self._in_pool(identity)
        return identity

    def from_body(
        self,
        identity: Identity,
        body: bytes,
        content_type: bytes,
        *,
        want_fingerprint: bool = False,
    ) -> Identity:
        """Complete what `from_headers` gave from the body, and return it.

        Bodies that are compressed or said to be other than JSON are not looked at. Without a key from the
        headers, body rules are tried, and then the fingerprint is made whether wanted or not.
        """
        if identity.encoded or not _said_json(content_type):
            return identity
        head = self._reader.read(body)
        if head is None:
            return identity
        user: BodyRule | None = None
        user_digest = _NOBODY
        found_before = identity.key is not None
        if not found_before:
            for rule, text in zip(self._body, self._reader.values(head), strict=True):
                if text is None:
                    continue
                session = wrapped_session(text) if rule.scope == "user" else text
                value = (text if session is None else session).encode()
                if not self._usable(value):
                    continue
                if session is not None:
                    identity.session = identity.key = self._digest(value, identity.tenant)
                    identity.rule = rule.name
                    break
                if user is None:
                    user, user_digest = rule, self._digest(value)
        if want_fingerprint or identity.key is None:
            identity.fingerprint = fingerprint(head)
        if identity.key is None and identity.fingerprint:
            # Begins with NUL, which no usable value holds: never the digest of a session.
            identity.key = self._digest(
                b"\x00"
                + identity.fingerprint.to_bytes(8, "big")
                + (self._digest(identity.credential) if identity.credential else _NOBODY)
                + user_digest
                + (string(head.model) or "").encode()
            )
            identity.rule = "fingerprint" if user is None else user.name
        if identity.pool and not found_before:
            self._in_pool(identity)
        return identity

    def _in_pool(self, identity: Identity) -> None:
        """Of all keys those of the same in the pool."""
        identity.session, identity.agent, identity.parent, identity.key = (
            key and self._pooled(key, identity.pool)
            for key in (identity.session, identity.agent, identity.parent, identity.key)
        )

    def _pooled(self, key: bytes, pool: bytes) -> bytes:
        return self._digest(b"\x00\x01%b\x00%b" % (pool, key)) if pool else key

    def digest_of(self, session: str, tenant: bytes = b"", pool: bytes = b"") -> bytes:
        """The key in a pool of a session by its own value, as a client, or this tenant, would send it in a header."""
        return self._pooled(self._digest(session.encode(), tenant), pool)

    def response_key(self, response: str, tenant: bytes = b"") -> bytes | None:
        """The key of a response of `/v1/responses` by its id, this tenant's; None when the id cannot be one."""
        value = response.encode()
        return PREFIX + self._digest(b"\x00response\x00" + value, tenant) if self._usable(value) else None

    def _usable(self, value: bytes) -> bool:
        return 0 < len(value) <= self._max and len(value.translate(None, _CONTROLS)) == len(value)

    def _digest(self, value: bytes, tenant: bytes = b"") -> bytes:
        state = self._hash.copy()
        if tenant:
            # Begins with NUL, which no usable value holds, and ends at the next, which no tenant's name does.
            state.update(b"\x00\x00%b\x00" % tenant)
        state.update(value)
        return state.digest()


def is_json(headers: Mapping[bytes, bytes], content_type: bytes) -> bool:
    """Whether a body with such headers may be looked at: it is not compressed, and not said to be other than JSON."""
    return not _is_encoded(headers) and _said_json(content_type)


def _is_encoded(headers: Mapping[bytes, bytes]) -> bool:
    encoding = headers.get(_ENCODING)
    return encoding is not None and encoding.lower() != b"identity"


def _said_json(content_type: bytes) -> bool:
    return not content_type or b"json" in content_type.lower()


class _Wrapped(msgspec.Struct):
    session_id: str


_wrapped = msgspec.json.Decoder(_Wrapped).decode


def wrapped_session(user_id: str) -> str | None:
    """The session that Claude Code wraps in `metadata.user_id`, None in any other value.

    A JSON object with `session_id`; in builds before that `user_<hash>_account_<uuid>_session_<uuid>`.
    """
    if user_id.startswith("{"):
        try:
            return _wrapped(user_id).session_id
        except ERRORS:
            return None
    head, mark, session = user_id.rpartition("_session_")
    return session if mark and head.startswith("user_") else None
