"""One connection to a replica: sends a request, parses the answer, relays its body."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol

import httptools

from router.proxy.chunk import is_whole
from router.proxy.headers import Header, named_in_connection

if TYPE_CHECKING:
    from router.proxy.upstream import Upstream

MAX_HEAD_BYTES = 262_144
"""Of an answer; a replica whose head is larger is not speaking sense."""
MAX_HEADERS = 1024
"""Of an answer; many empty ones take fifty times the memory of their bytes."""
MAX_INTERIM = 32
"""1xx answers before a final one; more is a flood."""
TAIL_READS: Final = 4
TAIL_READ_BYTES: Final = 4096
"""The last reads of an answer that are kept, and how much of each: usage comes in the last two events."""

_control = re.compile(rb"[\x00-\x08\x0b-\x1f\x7f]").search


def _nowhere(data: bytes) -> None:
    raise RuntimeError("relaying without a client")


class Receiver(Protocol):
    """Who asked, and decides what becomes of the answer."""

    head_only: bool
    """The request was HEAD: no body follows, whatever the head says."""

    def on_data(self, connection: UpstreamConnection) -> None:
        """Something was parsed: a head, some body, an end, or nonsense."""

    def upstream_lost(self, connection: UpstreamConnection) -> None:
        """The connection ended before the answer did."""


class UpstreamConnection:
    """The upstream half of the pair. Its receiver decides; this parses and passes bytes on.

    A protocol of asyncio without its base class, which has nothing to give: so mypyc can compile it whole.
    """

    __slots__ = (
        "_at_boundary",
        "_interims",
        "_parser",
        "_paused",
        "_poisoned",
        "_reads",
        "_tail",
        "alive",
        "chunked",
        "chunks",
        "complete",
        "connection_values",
        "delimited",
        "ended",
        "fast",
        "fragments",
        "head_bytes",
        "headed",
        "headers",
        "idle_since",
        "interim",
        "keep_alive",
        "phrase",
        "received",
        "receiver",
        "relayed",
        "relaying",
        "reused",
        "status",
        "transport",
        "unsound",
        "upstream",
        "write",
    )

    def __init__(self, upstream: Upstream) -> None:
        self.upstream = upstream
        self.transport: asyncio.Transport | None = None
        self.alive = False
        self.ended = False
        """The replica said that it sends no more: by closing, over TLS by `close_notify`, which nobody can forge."""
        self.idle_since = 0.0
        self.reused = False
        self.receiver: Receiver | None = None
        self._paused = False
        self._reset()
        self._parser = httptools.HttpResponseParser(self)

    def _reset(self) -> None:
        self.status = 0
        self.phrase = b""
        self.headers: list[Header] = []
        self.connection_values: list[bytes] = []
        self.head_bytes = 0
        self.headed = False
        self.complete = False
        self.chunked = False
        self.delimited = False
        """Whether the end of the body is told by length or chunks; otherwise only by the connection's end."""
        self.unsound: str | None = None
        """Why the answer cannot be passed on, if it cannot."""
        self.keep_alive = False
        self.interim: list[tuple[int, bytes, list[Header], frozenset[bytes]]] = []
        """1xx answers: status, phrase, headers, and which of those are for this hop only."""
        self.fragments: list[bytes] = []
        self.received = 0
        """Bytes parsed."""
        self.relayed = 0
        """Bytes passed on unparsed."""
        self.chunks = 0
        """Chunks of the body that came whole, the empty one at its end included."""
        self._reads = 0
        self._tail = [b""] * TAIL_READS
        """The last reads, each in the place of its number."""
        self.fast = False
        self.relaying = False
        """Set by the receiver when every further whole chunk may be written to the client as it is."""
        self._at_boundary = False
        self._poisoned = False
        self._interims = 0
        self.write: Callable[[bytes], None] = _nowhere
        """The client's transport, once relaying."""

    # Towards the replica

    def send(self, receiver: Receiver, parts: list[bytes]) -> None:
        """Send a request: head and body, as they are."""
        assert self.transport is not None
        self.receiver = receiver
        if len(parts) == 1:
            self.transport.write(parts[0])
        else:
            self.transport.writelines(parts)

    def release(self, now: float) -> None:
        """The answer is complete: keep the connection if it can serve again."""
        self.receiver = None
        transport = self.transport
        assert transport is not None
        if (
            self.keep_alive
            and self.alive
            and not self._poisoned
            and not transport.is_closing()
            and self.upstream.idle_s > 0
            and transport.get_write_buffer_size() == 0
        ):
            if self._paused:
                self.resume()
            self.reused = True
            self._reset()
            self.upstream.put(self, now)
        else:
            self.close()  # at once: a replica that answered early may never read the rest of the request

    def close(self) -> None:
        """Break off at once, whatever is under way."""
        self.receiver = None
        self.alive = self.fast = False
        if self.transport is not None:
            self.transport.abort()

    def pause(self) -> None:
        """The client does not keep up: stop reading from the replica."""
        if not self._paused and self.transport is not None and not self.transport.is_closing():
            self._paused = True
            self.transport.pause_reading()

    def resume(self) -> None:
        """The client caught up."""
        if self._paused and self.transport is not None and not self.transport.is_closing():
            self._paused = False
            self.transport.resume_reading()

    def _keep(self, data: bytes) -> None:
        self._tail[self._reads % TAIL_READS] = data if len(data) <= TAIL_READ_BYTES else data[-TAIL_READ_BYTES:]
        self._reads += 1

    @property
    def tail(self) -> bytes:
        """The end of what was read of the answer."""
        oldest = self._reads % TAIL_READS
        return b"".join(self._tail[oldest:] + self._tail[:oldest])

    @property
    def hop(self) -> frozenset[bytes]:
        """Headers that the answer's `connection` header keeps to this hop."""
        return named_in_connection(self.connection_values)

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        self.alive = True
        self.upstream.open += 1
        if transport.get_extra_info("sslcontext") is not None:
            # uvloop forgets what it holds undecrypted, while reading is paused, when the connection ends. So it is to
            # hold as little as it can: with more to come the socket itself is paused, and its end not seen.
            transport.set_read_buffer_limits(1)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        if self.fast:
            # One read, one whole chunk: the bytes go on as they came. Everything else is parsed.
            if is_whole(data):
                self.relayed += len(data)
                self.chunks += 1
                self._keep(data)
                self.write(data)
                return
            self.fast = False
        self._parse(data)

    def eof_received(self) -> None:
        self.ended = True

    def connection_lost(self, exc: Exception | None) -> None:
        self.alive = False
        self.upstream.open -= 1
        receiver = self.receiver
        if receiver is None:
            return
        self.receiver = None
        if self.ended and self.headed and not self.delimited and not self.complete and self.unsound is None:
            self.complete = True
            receiver.on_data(self)
        else:
            receiver.upstream_lost(self)

    def pause_writing(self) -> None:
        """The request is held whole and written whole: there is nobody to hold back."""

    def resume_writing(self) -> None:
        pass

    def _parse(self, data: bytes) -> None:
        receiver = self.receiver
        if receiver is None:
            self.close()  # nothing was asked: whatever this is, the connection cannot be trusted
            return
        self.received += len(data)
        self._keep(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self.unsound = "it switches protocols"
        except httptools.HttpParserError as error:
            if self.complete:
                self._poisoned = True
            else:
                self.unsound = str(error) or type(error).__name__
        if not self.headed and self.unsound is None:
            self.head_bytes += len(data)
            if self.head_bytes > MAX_HEAD_BYTES:
                self.unsound = "its head is too large"
            elif not self.interim:
                return
        elif self.headed and not self.complete and not self.fragments:
            self.head_bytes += len(data)  # trailers, or chunk sizes without end
            if self.head_bytes > MAX_HEAD_BYTES:
                self.unsound = "its trailers are too large"
        receiver.on_data(self)
        self.fast = self.relaying and self._at_boundary and data.endswith(b"\r\n") and self.receiver is receiver

    # httptools callbacks: they only take note

    def on_message_begin(self) -> None:
        if self.complete:
            self._poisoned = True

    def on_status(self, phrase: bytes) -> None:
        if self._poisoned:
            return
        self.phrase += phrase
        if _control(phrase) is not None:
            self.unsound = "its reason phrase has control characters"  # which the parser lets through

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.headed or self._poisoned:
            return  # trailers are dropped
        lower = name.lower()
        if lower == b"connection":
            self.connection_values.append(value)
        elif lower == b"transfer-encoding":
            # Only spaces are taken off: with a tab behind it the parser does not know the word, and reads to the end.
            if self.chunked or value.strip(b" ").lower() != b"chunked":
                self.unsound = "its transfer coding is not plain chunked"
            self.chunked = True
        elif lower == b"content-length":
            self.delimited = True
        if len(self.headers) >= MAX_HEADERS:
            self.unsound = "it has too many headers"
            return
        self.headers.append((lower, name, value))

    def on_headers_complete(self) -> None:
        if self._poisoned:
            return
        status = self._parser.get_status_code()
        if 100 <= status < 200:
            if status == 101:
                self.unsound = "it switches protocols"
            self._interims += 1
            if self._interims > MAX_INTERIM:
                self.unsound = "it sends 1xx answers without end"
            headers = [header for header in self.headers if header[0] != b"content-length"]
            self.interim.append((status, self.phrase, headers, self.hop))
            self.headers = []
            self.connection_values = []
            self.phrase = b""
            self.chunked = self.delimited = False
            return
        self.status = status
        self.headed = True
        assert self.receiver is not None
        if self.chunked or status in (204, 304) or self.receiver.head_only:
            self.delimited = True
        if self.receiver.head_only:
            # The parser cannot be told that no body follows: this message ends here, and a new parser begins.
            self.keep_alive = self._parser.should_keep_alive()
            self.complete = True
            self._parser = httptools.HttpResponseParser(self)

    def on_body(self, body: bytes) -> None:
        if self.complete:
            self._poisoned = True  # an answer to HEAD with a body
        elif not self._poisoned:
            self.fragments.append(body)

    def on_chunk_header(self) -> None:
        self._at_boundary = False

    def on_chunk_complete(self) -> None:
        self._at_boundary = True
        self.chunks += 1

    def on_message_complete(self) -> None:
        if not self.headed or self._poisoned or self.complete:
            return  # a 1xx answer, or more than was asked for
        self.complete = True
        self.keep_alive = self._parser.should_keep_alive()
