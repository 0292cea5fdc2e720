"""Request and response heads: what is passed on, what stays on its own hop, what is added."""

from __future__ import annotations

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

_OURS = HOP_BY_HOP | {b"host", b"content-length", b"expect", b"x-request-id", b"x-forwarded-for"}
"""Request headers that are written anew, or answered here."""

_PROTECTED = frozenset({b"host", b"content-length", b"authorization", b"content-type", b"content-encoding"})
"""Never dropped because a `connection` header names them: the message would mean something else without."""

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
    return 0 < len(value) <= 128 and value.isascii() and b" " not in value


def request_head(
    method: bytes,
    target: bytes,
    authority: bytes,
    headers: Sequence[Header],
    *,
    hop: frozenset[bytes],
    client: bytes,
    host: bytes,
    scheme: bytes,
    identifier: bytes,
    length: int | None,
) -> bytes:
    """The head sent to a replica. `length` None: the request has no body and says nothing of one."""
    out = [method, b" ", target, b" HTTP/1.1\r\nhost: ", authority, b"\r\n"]
    forwarded_for = b""
    proto = forwarded_host = False
    for lower, name, value in headers:
        if lower in _OURS:
            if lower == b"x-forwarded-for":
                forwarded_for = forwarded_for + b", " + value if forwarded_for else value
            continue
        if lower in hop:
            continue
        if lower == b"x-forwarded-proto":
            proto = True
        elif lower == b"x-forwarded-host":
            forwarded_host = True
        out += (name, b": ", value, b"\r\n")
    if client:
        out += (b"x-forwarded-for: ", forwarded_for + b", " + client if forwarded_for else client, b"\r\n")
    elif forwarded_for:
        out += (b"x-forwarded-for: ", forwarded_for, b"\r\n")
    if not proto:
        out += (b"x-forwarded-proto: ", scheme, b"\r\n")
    if not forwarded_host and host:
        out += (b"x-forwarded-host: ", host, b"\r\n")
    out += (b"x-request-id: ", identifier, b"\r\n")
    if length is not None:
        out.append(b"content-length: %d\r\n" % length)
    out.append(b"\r\n")
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
        if lower in HOP_BY_HOP or lower in hop:
            continue
        if lower == b"x-request-id":
            has_id = True
        out += (name, b": ", value, b"\r\n")
    if not has_id:
        out += (b"x-request-id: ", identifier, b"\r\n")
    out += (framing, extra, b"\r\n")
    return b"".join(out)
