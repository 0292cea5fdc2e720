"""Reading a request's head: what it asks for, and whether that can be done here."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import httptools

from router import errors
from router.errors import Refusal
from router.hosts import in_url
from router.proxy.headers import request_id

if TYPE_CHECKING:
    from router.proxy.exchange import Exchange

_READ = frozenset(
    {
        b"host",
        b"content-length",
        b"content-type",
        b"connection",
        b"transfer-encoding",
        b"expect",
        b"x-request-id",
        b"via",
    }
)
"""Headers that are looked at here."""

HEADER_COST_BYTES = 32
"""What a header counts beside name and value, as in HTTP/2 (RFC 9113, section 6.5.2): empty ones take memory, too."""


def read_head(exchange: Exchange, parser: httptools.HttpRequestParser, transport: asyncio.Transport) -> Refusal | None:
    """Fill in the exchange from its head, read whole. Returns why it is refused, if it is."""
    proxy = exchange.proxy
    exchange.headed = True
    exchange.method = method = parser.get_method()
    exchange.head_only = method == b"HEAD"
    exchange.since = proxy.now
    hosts = 0
    headers = exchange.headers
    size = len(exchange.target) + 16 + HEADER_COST_BYTES * len(headers)
    length = 0
    chunked = looped = False
    expects: bytes | None = None
    coding: Refusal | None = None
    wanted = proxy.identity.header_names
    for lower, name, value in headers:
        size += len(name) + len(value)
        if lower in wanted:
            exchange.known[lower] = value
        if lower not in _READ:
            continue
        if lower == b"host":
            hosts += 1
            exchange.host = value
        elif lower == b"content-length":
            length = int(value)
        elif lower == b"content-type":
            exchange.content_type = value
        elif lower == b"connection":
            exchange.connection_values.append(value)
        elif lower == b"transfer-encoding":
            chunked = True
            if value.strip().lower() != b"chunked":
                coding = errors.BAD_CODING
        elif lower == b"expect":
            expects = value.strip().lower()
        elif lower == b"via":
            looped = looped or proxy.name in value
        elif request_id(value):
            exchange.identifier = value
    if not exchange.identifier:
        exchange.identifier = proxy.new_identifier()
    version = parser.get_http_version()
    exchange.http10 = version == "1.0"
    if coding is not None:
        return coding
    if version not in ("1.1", "1.0"):
        return errors.BAD_VERSION
    if chunked and exchange.http10:
        return errors.BAD_CODING  # RFC 9112, section 6.1: framing of which one side may know nothing
    if looped:
        return errors.LOOP
    if size > proxy.limits.header_bytes:
        return errors.HEADERS_TOO_LARGE
    if method == b"CONNECT":
        return errors.CONNECT
    if parser.should_upgrade():
        return errors.UPGRADE
    if hosts != 1 and (version == "1.1" or hosts):
        return errors.BAD_HOST
    if not exchange.target.startswith(b"/") and (refusal := _read_target(exchange, transport)) is not None:
        return refusal
    if proxy.cors is not None:
        proxy.cors.note(exchange, bodiless=not length and not chunked)
    # Before the body is received: a stranger is to hold no memory here.
    if proxy.keys is not None and not exchange.preflight and (refusal := proxy.keys.admit(exchange)) is not None:
        return refusal
    if length > proxy.limits.body_bytes:
        return errors.BODY_TOO_LARGE
    if expects is not None and version == "1.1":
        if expects != b"100-continue":
            return errors.BAD_EXPECT
        exchange.expect_continue = True
    return None


def _read_target(exchange: Exchange, transport: asyncio.Transport) -> Refusal | None:
    """A target that is no path: `*`, or an absolute form, which is turned into a path when it names this router."""
    target = exchange.target
    if target == b"*":
        return None if exchange.method == b"OPTIONS" else errors.BAD_TARGET
    scheme, separator, rest = target.partition(b"://")
    if not separator or scheme.lower() not in (b"http", b"https"):
        return errors.BAD_TARGET
    authority, slash, path = rest.partition(b"/")
    if authority.lower() not in _own_authorities(transport):
        return errors.FOREIGN_HOST
    exchange.target = slash + path if slash else b"/"
    return None


def _own_authorities(transport: asyncio.Transport) -> set[bytes]:
    """How a client may name this very socket in an absolute-form target."""
    address = transport.get_extra_info("sockname")
    if not isinstance(address, tuple):
        return set()
    host, port = str(address[0]), address[1]
    names = {in_url(host), "localhost", "127.0.0.1", "[::1]"}
    return {f"{name}:{port}".encode() for name in names} | ({n.encode() for n in names} if port == 80 else set())
