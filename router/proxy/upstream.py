"""A replica's address and its pool of kept-alive connections."""

from __future__ import annotations

import asyncio
import errno
from collections import deque
from urllib.parse import urlsplit

from router import ranks
from router.proxy.connection import UpstreamConnection
from router.tls import ReplicaTls

MAX_IDLE = 1024
"""Idle connections kept per replica; more are closed."""

_OURS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})


def is_ours(error: Exception) -> bool:
    """Whether a failure to connect says nothing of the replica: this process or machine is short of something."""
    return isinstance(error, OSError) and error.errno in _OURS


class Upstream:
    """One replica, as the data path reaches it.

    Idle connections are dropped after `idle_s`, before the engine does (5 s in SGLang's uvicorn), and
    the most recently used is taken first, so that the rest can grow old. Raises ValueError for a bad URL.

    `tls` is for https, the fleet's own or by default the system's authorities. `credential`, a header line, goes with
    every request, probes included, and so does what names the engine's `rank` where it is one.
    """

    def __init__(
        self,
        url: str,
        *,
        connect_s: float,
        idle_s: float,
        tls: ReplicaTls | None = None,
        credential: bytes = b"",
        rank: int | None = None,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https"):
            raise ValueError(f"replica URL {url!r}: the scheme must be http or https, as in http://10.0.0.1:30000")
        if not parts.hostname:
            raise ValueError(f"replica URL {url!r}: the host is missing, write it as in http://10.0.0.1:30000")
        if parts.query or parts.fragment or parts.username:
            raise ValueError(f"replica URL {url!r}: leave out user, query and fragment")
        try:
            port = parts.port
        except ValueError:
            raise ValueError(f"replica URL {url!r}: the port must be a number from 1 to 65535") from None
        self.url = url
        self.host = parts.hostname
        self.port = port or (443 if parts.scheme == "https" else 80)
        self.authority = parts.netloc.encode("ascii")
        self.base = parts.path.rstrip("/").encode("ascii")
        self.tls = (tls or ReplicaTls()) if parts.scheme == "https" else None
        self.rank = rank
        """Of the engine's data-parallel ranks the one that it is; None when it is the whole engine."""
        self.replaced: frozenset[bytes] = ranks.HEADERS if rank is not None else frozenset()
        """Names of headers, in lower case, that are written anew for it: a client's own do not go on."""
        self.extra = b""
        """Whole header lines that go with every request."""
        self.show(credential)
        self.connect_s = connect_s
        self.idle_s = idle_s
        self.open = 0
        """Connections that are open, idle ones included. Only UpstreamConnection changes it."""
        self._idle: deque[UpstreamConnection] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None

    def show(self, credential: bytes) -> None:
        """From now on this header line goes with every request; none when it is empty."""
        self.extra = credential if self.rank is None else credential + ranks.header_lines(self.rank)

    def take(self, now: float) -> UpstreamConnection | None:
        """An idle connection that is still good, or None."""
        idle = self._idle
        while idle:
            connection = idle.pop()
            if connection.alive and now - connection.idle_since < self.idle_s:
                return connection
            connection.close()
        return None

    def put(self, connection: UpstreamConnection, now: float) -> None:
        """Keep a connection for the next request."""
        connection.idle_since = now
        self._idle.append(connection)
        if len(self._idle) > MAX_IDLE:
            self._idle.popleft().close()

    async def connect(self) -> UpstreamConnection:
        """Open a connection. Raises OSError, or TimeoutError after `connect_s`."""
        loop = asyncio.get_running_loop()
        connection = UpstreamConnection(self)
        try:
            async with asyncio.timeout(self.connect_s):
                await loop.create_connection(  # type: ignore[type-var] # it has all that is called
                    lambda: connection,
                    self.host,
                    self.port,
                    ssl=self.tls.context if self.tls is not None else None,
                )
        except BaseException:
            # Given up just as it was made: uvloop closes it then, and tells it nothing.
            if connection.transport is not None and not connection.transport.is_closing():
                connection.connection_lost(None)
            raise
        return connection

    def sweep(self, now: float) -> None:
        """Close connections idle for too long."""
        idle = self._idle
        while idle and (not idle[0].alive or now - idle[0].idle_since >= self.idle_s):
            idle.popleft().close()

    def close(self) -> None:
        """Drop the idle connections; those in use end in their own time and are not kept."""
        self.idle_s = 0.0
        while self._idle:
            self._idle.pop().close()
