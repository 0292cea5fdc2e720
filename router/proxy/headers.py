"""Request and response heads: what is passed on, what stays on its own hop, what is added."""

from __future__ import annotations

import re
from collections.abc import Sequence

Header = tuple[bytes, bytes, bytes]
"""Lower-case name, name as sent, value."""

HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
"""RFC 9110, section 7.6.1, with the older names of RFC 2616, section 13.5.1."""

KEPT = frozenset(
    {b"host", b"content-length", b"content-type", b"content-encoding", b"transfer-encoding", b"connection", b"expect"}
)
"""No list of headers to drop reaches these: the message would mean something else without, or they are ours."""

_OF_CORS = frozenset(
    {
        b"access-control-allow-credentials",
        b"access-control-allow-headers",
        b"access-control-allow-methods",
        b"access-control-allow-origin",
        b"access-control-allow-private-network",
        b"access-control-expose-headers",
        b"access-control-max-age",
    }
)
"""Which web pages may use this port is not for a replica to say: SGLang's server allows all of them."""

_NOT_FROM_REPLICAS = HOP_BY_HOP | _OF_CORS

_OURS = HOP_BY_HOP | {b"host", b"content-length", b"expect", b"x-request-id", b"x-forwarded-for"}
"""Request headers that are written anew, or answered here."""

_PROTECTED = frozenset({b"host", b"content-length", b"authorization", b"content-type", b"content-encoding"})
"""Never dropped because a `connection` header names them: the message would mean something else without."""

_VISIBLE = re.compile(rb"[!-~]{1,128}").fullmatch

_NOTHING: frozenset[bytes] = frozenset()


def named_in_connection(values: Sequence[bytes]) -> frozenset[bytes]:
    """Lower-case header names that the `connection` headers declare to be for this hop only."""
    if not values:
        return _NOTHING
    if len(values) == 1 and values[0] in (b"keep-alive", b"close", b"Keep-Alive", b"Close"):
        return _NOTHING
    names = {token.strip().lower() for value in values for token in value.split(b",")}
    return frozenset(names - _PROTECTED)


def request_id(value: bytes) -> bool:
    """Whether a client's request id is kept: 1 to 128 visible characters."""
    return _VISIBLE(value) is not None


class Drop:
    """Which headers do not go on: those that are denied, or, with a list of those allowed, all others."""

    __slots__ = ("_allow", "_deny")

    def __init__(self, *, deny: Sequence[str], allow: Sequence[str]) -> None:
        self._deny = frozenset(name.lower().encode() for name in deny)
        self._allow = KEPT.union(name.lower().encode() for name in allow) if allow else None

    def among(self, headers: Sequence[Header]) -> frozenset[bytes]:
        """The names, in lower case, of those that do not go on."""
        if self._allow is None:
            return self._deny
        return frozenset(lower for lower, _, _ in headers) - self._allow


class Sender:
    """Who sent a request: what is said of it to the replica is the same for all of a connection's requests."""

    __slots__ = ("address", "forwarded_for", "forwarded_proto", "via")

    def __init__(self, address: bytes, scheme: bytes, name: bytes = b"") -> None:
        self.address = address
        """IP address; empty for a client on a Unix socket."""
        self.forwarded_for = b"x-forwarded-for: %b\r\n" % address if address else b""
        self.forwarded_proto = b"x-forwarded-proto: %b\r\n" % scheme
        self.via = b"via: 1.1 %b\r\n" % name if name else b""


def request_head(
    method: bytes,
    target: bytes,
    authority: bytes,
    headers: Sequence[Header],
    *,
    hop: frozenset[bytes],
    host: bytes,
    sender: Sender,
    identifier: bytes,
    length: int | None,
    extra: bytes = b"",
) -> bytes:
    """The head sent to a replica. `length` None: the request has no body and says nothing of one.

    `hop`: names of headers that do not go on. `extra`: whole header lines of ours.
    """
    out = [b"%b %b HTTP/1.1\r\nhost: %b\r\n" % (method, target, authority)]
    forwarded_for: list[bytes] = []
    forwarded_proto = sender.forwarded_proto
    forwarded_host = host
    for lower, name, value in headers:
        if lower in _OURS:
            if lower == b"x-forwarded-for":
                forwarded_for.append(value)
            continue
        if lower in hop:
            continue
        if lower == b"x-forwarded-proto":
            forwarded_proto = b""
        elif lower == b"x-forwarded-host":
            forwarded_host = b""
        out += (name, b": ", value, b"\r\n")
    if forwarded_for:
        hops = [*forwarded_for, sender.address] if sender.address else forwarded_for
        out.append(b"x-forwarded-for: %b\r\n" % b", ".join(hops))
    else:
        out.append(sender.forwarded_for)
    out += (forwarded_proto, sender.via, extra)
    if forwarded_host:
        out += (b"x-forwarded-host: ", forwarded_host, b"\r\n")
    if length is None:
        out.append(b"x-request-id: %b\r\n\r\n" % identifier)
    else:
        out.append(b"x-request-id: %b\r\ncontent-length: %d\r\n\r\n" % (identifier, length))
    return b"".join(out)


def response_head(
    status: int,
    phrase: bytes,
    headers: Sequence[Header],
    *,
    hop: frozenset[bytes],
    framing: bytes,
    extra: bytes,
    identifier: bytes,
) -> bytes:
    """The head sent to the client. `framing` and `extra` are whole header lines of ours."""
    out = [b"HTTP/1.1 %d %b\r\n" % (status, phrase)]
    has_id = False
    for lower, name, value in headers:
        if lower in _NOT_FROM_REPLICAS or lower in hop:
            continue
        if lower == b"x-request-id":
            has_id = True
        out += (name, b": ", value, b"\r\n")
    if not has_id:
        out += (b"x-request-id: ", identifier, b"\r\n")
    out += (framing, extra, b"\r\n")
    return b"".join(out)
