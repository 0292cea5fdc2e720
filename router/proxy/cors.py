"""CORS: which web pages may use the data port from a browser (the Fetch standard, section 3.2)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from router.proxy.exchange import Exchange

_VARY = b"vary: origin\r\n"
_EXPOSED = b"access-control-expose-headers: retry-after, x-request-id, x-warmroute-replica, x-warmroute-reason\r\n"
_METHODS = b"access-control-allow-methods: GET, HEAD, POST, PUT, PATCH, DELETE\r\n"
_MAX_AGE = b"access-control-max-age: 600\r\n"

_NAMES = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z, -]{1,1024}").fullmatch


class Cors:
    """A closed list of origins. Pages of others get answers that their browser keeps from them."""

    def __init__(self, origins: Sequence[str]) -> None:
        self._origins = frozenset(origin.encode() for origin in origins)

    def note(self, exchange: Exchange, *, bodiless: bool) -> None:
        """Write down, once the head has been read, what the answer says to a browser.

        A preflight is answered here, and asked for no key: browsers send none with it. Hence it is one only if it
        has no body, which a stranger could have held here otherwise.
        """
        origin = method = names = b""
        for lower, _, value in exchange.headers:
            if lower == b"origin":
                origin = value
            elif lower == b"access-control-request-method":
                method = value
            elif lower == b"access-control-request-headers":
                names = value
        exchange.preflight = exchange.method == b"OPTIONS" and bool(origin and method) and bodiless
        if origin not in self._origins:
            exchange.cors = _VARY
            return
        exchange.cors = b"access-control-allow-origin: %b\r\n%b" % (origin, _VARY)
        if not exchange.preflight:
            exchange.cors += _EXPOSED
            return
        exchange.cors += _METHODS + _MAX_AGE
        if _NAMES(names):
            exchange.cors += b"access-control-allow-headers: %b\r\n" % names
