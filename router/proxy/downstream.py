"""One client connection: parses requests, keeps answers in order, ends when the client does."""

from __future__ import annotations

import asyncio
import select
import socket
import struct
from collections import deque
from typing import TYPE_CHECKING, Any

import httptools

from policies.types import Phase
from router import errors
from router.errors import Refusal
from router.proxy.exchange import Exchange
from router.proxy.headers import Sender
from router.proxy.request import read_head

if TYPE_CHECKING:
    from router.proxy.proxy import Proxy

MAX_PIPELINED = 16
"""Requests read ahead of the one being answered; past it the client is not read from."""
MAX_AHEAD = 256
"""Requests ahead in all. One read may hold 10,000 small ones, at 2 KB of memory each: no client sends so many."""
SMALL_CHUNK_BYTES = 4096
"""Body pieces below this are joined to the one before, so that a dripping client cannot multiply its memory."""
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
LINGER_S = 2.0
"""How long a client that was refused is read from and ignored, so that the answer is not lost to a reset; and how long
an idle one is listened to when the server stops."""
_HANG_UP = getattr(select, "POLLRDHUP", 0)
"""How Linux tells a close; a reset is told unasked, and everywhere."""


class Downstream:
    """The downstream half of the pair, made by uvicorn for each connection. Without a base, as the other half."""

    __slots__ = (
        "_discarding",
        "_head_bytes",
        "_lingering",
        "_parser",
        "_queue",
        "_read_paused",
        "_receiving",
        "_since",
        "_state",
        "closing",
        "paused_since",
        "proxy",
        "sender",
        "transport",
        "write",
    )

    def __init__(self, proxy: Proxy, server_state: Any) -> None:
        self.proxy = proxy
        self._state = server_state
        self._parser = httptools.HttpRequestParser(self)
        self._queue: deque[Exchange] = deque()
        """Requests in order: the first is being answered."""
        self._receiving: Exchange | None = None
        self._head_bytes = 0
        self._discarding = False
        """Nothing more is taken from this client: bytes are read and dropped."""
        self._lingering = False
        self._read_paused = False
        self._since = proxy.now
        """Since when the connection is idle, or closing, seconds."""
        self.closing = False
        """The present answer is the last."""
        self.paused_since: float | None = None
        """Since when the client has not kept up with reading, seconds."""
        self.sender = Sender(b"", b"http")

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]
        self.write = self.transport.write
        peer = transport.get_extra_info("peername")
        scheme = b"https" if transport.get_extra_info("sslcontext") is not None else b"http"
        self.sender = Sender(str(peer[0]).encode() if isinstance(peer, tuple) else b"", scheme, self.proxy.name)
        proxy = self.proxy
        self._state.connections.add(self)
        proxy.downstreams.add(self)
        if len(proxy.downstreams) > proxy.limits.connections:
            proxy.metrics.refused(errors.CONNECTIONS.reason)
            self.write(errors.render(errors.CONNECTIONS, close=True, head_only=False, request_id=b""))
            self._close(linger=True)

    def data_received(self, data: bytes) -> None:
        if self._discarding:
            return
        receiving = self._receiving
        body_bytes = receiving.body_bytes if receiving is not None else 0
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._discarding = True  # refused in on_headers_complete
        except httptools.HttpParserError as error:
            if not self._discarding:  # else it is what follows the last request that is answered
                self._malformed(error)
        if receiving is not None and receiving is self._receiving:
            # Reads that bring no body bring a head or trailers. The read in which a request begins is not
            # counted, since the one before may end in it; heads that are whole are measured exactly.
            if receiving.body_bytes == body_bytes:
                self._head_bytes += len(data)
                if self._head_bytes > self.proxy.limits.header_bytes:
                    self._refuse(errors.HEADERS_TOO_LARGE)
            else:
                self._head_bytes = 0

    def eof_received(self) -> bool:
        if self._queue:
            self.transport.abort()  # it left, or at least will not be told from one that did
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.closing = self._discarding = True
        self._state.connections.discard(self)
        self.proxy.downstreams.discard(self)
        receiving, self._receiving = self._receiving, None
        if receiving is not None:
            receiving.client_left()
        while self._queue:
            self._queue.popleft().client_left()

    def pause_writing(self) -> None:
        self.paused_since = self.proxy.now
        if self._queue:
            self._queue[0].hold_back()

    def resume_writing(self) -> None:
        self.paused_since = None
        if self._queue:
            if (connection := self._queue[0].connection) is not None:
                connection.resume()
            else:
                self.proxy.loop.call_soon(self._next)

    # uvicorn

    def shutdown(self) -> None:
        """The server stops: finish what is under way, take one request more at most.

        An idle connection is not closed at once: a request may be on its way, sent in good faith, and would be lost
        to a reset. What comes within `LINGER_S` is answered, with `connection: close`.
        """
        if not self.closing:
            self.closing = True
            self._since = self.proxy.clock()

    @property
    def busy(self) -> bool:
        """Whether a request is being received or answered."""
        return bool(self._queue) or self._receiving is not None

    def abort(self) -> None:
        """End it at once."""
        self.transport.abort()

    # Receiving: httptools callbacks

    def on_message_begin(self) -> None:
        if self._discarding:
            return  # it follows, in the same read, one that was refused
        self._receiving = Exchange(self)
        self._head_bytes = 0
        if len(self._queue) >= MAX_AHEAD:
            self._refuse(errors.malformed("too many requests sent ahead of their answers"))

    def on_url(self, url: bytes) -> None:
        if self._receiving is not None:
            self._receiving.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        exchange = self._receiving
        if exchange is None or exchange.headed:
            return  # refused already, or a trailer
        exchange.headers.append((name.lower(), name, value))

    def on_headers_complete(self) -> None:
        exchange = self._receiving
        if exchange is None:
            return
        refusal = read_head(exchange, self._parser, self.transport)
        if refusal is not None:
            self._refuse(refusal)
        elif exchange.expect_continue and not self._queue:
            self.write(CONTINUE)

    def on_body(self, body: bytes) -> None:
        exchange = self._receiving
        if exchange is None:
            return
        proxy = self.proxy
        exchange.body_bytes += len(body)
        proxy.body_bytes += len(body)
        if exchange.body and len(exchange.body[-1]) < SMALL_CHUNK_BYTES:
            exchange.body[-1] += body
        else:
            exchange.body.append(body)
        if exchange.body_bytes > proxy.limits.body_bytes:
            self._refuse(errors.BODY_TOO_LARGE)
        elif proxy.body_bytes > proxy.limits.body_memory_bytes:
            self._refuse(errors.MEMORY)

    def on_message_complete(self) -> None:
        exchange, self._receiving = self._receiving, None
        if exchange is None:
            return
        exchange.keep_alive = self._parser.should_keep_alive() and not self.closing
        if not exchange.keep_alive:
            self._discarding = True
        self._enqueue(exchange)

    # Receiving: decisions

    def _malformed(self, error: httptools.HttpParserError) -> None:
        text = str(error)
        if "PRI/Upgrade" in text:
            self._refuse(errors.UPGRADE)
        elif isinstance(error, httptools.HttpParserInvalidMethodError):
            self._refuse(errors.malformed("unknown method"))
        else:
            self._refuse(errors.malformed(text[:100] or "unreadable"))

    def _refuse(self, refusal: Refusal) -> None:
        """Refuse what is being received, in its turn, and take nothing more from this connection."""
        self._discarding = True
        exchange, self._receiving = self._receiving, None
        if exchange is None:
            exchange = Exchange(self)
        if not exchange.identifier:
            exchange.identifier = self.proxy.new_identifier()
        exchange.refusal = refusal
        exchange.keep_alive = False
        if refusal is errors.HEADERS_TOO_LARGE:
            exchange.headers = []  # it may have to wait for its turn, and they must not wait with it
        self._enqueue(exchange)

    # Answering

    def _enqueue(self, exchange: Exchange) -> None:
        self._queue.append(exchange)
        if len(self._queue) == 1 and self.paused_since is None:
            exchange.start()
        elif len(self._queue) >= MAX_PIPELINED and not self._read_paused:
            self._read_paused = True
            self.transport.pause_reading()

    def done(self, exchange: Exchange) -> None:
        """The exchange has been answered whole: the next one's turn."""
        if not self._queue or self._queue[0] is not exchange:
            return  # the client left meanwhile
        self._queue.popleft()
        if not exchange.keep_alive or self.closing:
            self._close(linger=exchange.refusal is not None)
            return
        self._since = self.proxy.now
        if self._queue:
            # Not at once: a thousand pipelined refusals would otherwise nest a thousand deep.
            self.proxy.loop.call_soon(self._next)
        elif self._receiving is not None:
            self._receiving.since = self._since  # it had to wait for the answer before
            if self._receiving.expect_continue:
                self.write(CONTINUE)
        if self._read_paused and len(self._queue) < MAX_PIPELINED:
            self._read_paused = False
            self.transport.resume_reading()

    def _next(self) -> None:
        if self._lingering or self.transport.is_closing():
            return  # the last answer has been given
        # Not for a client that does not read: it could make the answers pile up by asking on.
        if self._queue and self.paused_since is None and self._queue[0].phase is Phase.REQUEST:
            self._queue[0].start()

    def pools_changed(self) -> None:
        """What waits for a place chooses among those that there are now."""
        if self._queue:
            self._queue[0].pools_changed()

    def break_off(self, exchange: Exchange) -> None:
        """The answer cannot be completed: end the connection so that it is not taken for whole."""
        self._discarding = self.closing = True
        self._since = self.proxy.now
        if exchange.http10:
            # Such a client takes a plain close for the end of the body: it must see a reset.
            sock = self.transport.get_extra_info("socket")
            if sock is not None:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.transport.abort()
        else:
            self.transport.close()

    def _close(self, *, linger: bool = False) -> None:
        self._discarding = self.closing = True
        self._since = self.proxy.now
        if linger and self.transport.can_write_eof() and not self.transport.is_closing():
            self._lingering = True
            self.transport.write_eof()
            if self._read_paused:
                self._read_paused = False
                self.transport.resume_reading()
        else:
            self.transport.close()

    def sweep(self, now: float) -> None:
        """Called about once a second: enforce every limit on waiting."""
        timeouts = self.proxy.timeouts
        if self.paused_since is not None and now - self.paused_since > timeouts.stalled_client_s:
            self.transport.abort()
        elif self._lingering:
            if now - self._since > LINGER_S:
                self.transport.abort()
        elif self.transport.is_closing():
            # The last answer waits for the client to read it. Nothing may be written behind it.
            if now - self._since > timeouts.stalled_client_s:
                self.transport.abort()
        elif self._queue:
            if self._read_paused and _gone(self.transport):
                self.transport.abort()
            else:
                self._queue[0].sweep(now)
        elif (receiving := self._receiving) is not None:
            if not receiving.headed:
                if now - receiving.since > timeouts.header_s:
                    self._refuse(errors.HEADER_TIMEOUT)
            elif now - receiving.since > timeouts.body_s:
                self._refuse(errors.BODY_TIMEOUT)
        elif now - self._since > (LINGER_S if self.closing else timeouts.keep_alive_s):
            self._close()


def _gone(transport: asyncio.Transport) -> bool:
    """Whether the client has closed or broken off, told without reading what it sent before."""
    sock = transport.get_extra_info("socket")
    if sock is None:
        return False
    poll = select.poll()
    poll.register(sock.fileno(), _HANG_UP)
    return bool(poll.poll(0))
