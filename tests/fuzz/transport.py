"""A transport without a socket, strict where uvloop's is: it refuses to be used after its end."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from tests.fuzz.loop import FuzzLoop

HIGH_WATER_BYTES = 65_536
"""uvloop's own: what is buffered beyond it pauses the writer."""


class FuzzTransport(asyncio.Transport):
    """One end of a connection. `out` is all that was written; the case plays the other end."""

    def __init__(self, loop: FuzzLoop, address: str, wrote: Callable[[bytes], None] | None = None) -> None:
        super().__init__()
        self.address = address
        self.out = bytearray()
        self.reads_nothing = False
        """The other end does not read: what is written piles up here."""
        self.lost = False
        """connection_lost was called."""
        self.half_closed = False
        self.protocol: Any = None
        self._loop = loop
        self._wrote = wrote
        self._inbox: deque[bytes | None] = deque()
        """What the other end sent and this one has not read; None is its end."""
        self._paused = self._closing = self._aborted = self._pressed = self._broken = False
        self._buffered = 0

    def attach(self, protocol: Any) -> None:
        self.protocol = protocol
        self._loop.guarded(protocol.connection_made, self)

    # The router's side

    def _check(self) -> None:
        if self.lost:
            raise RuntimeError("unable to perform operation: the handler is closed")

    def write(self, data: Any) -> None:
        self._check()
        if self.half_closed:
            raise RuntimeError("Cannot call write() after write_eof()")
        if self._aborted or not data:
            return
        self.out += data
        if self.reads_nothing:
            self._buffered += len(data)
            self._loop.call_soon(self._press)
        if self._wrote is not None:
            self._wrote(bytes(data))

    def writelines(self, parts: Iterable[Any]) -> None:
        for part in parts:
            self.write(part)

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self._check()
        self.half_closed = True

    def get_write_buffer_size(self) -> int:
        return self._buffered

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Always uvloop's own."""

    def pause_reading(self) -> None:
        self._check()
        self._paused = True

    def resume_reading(self) -> None:
        self._check()
        self._paused = False
        if self._broken:
            self._loop.call_soon(self._lose, ConnectionResetError())
        self._loop.call_soon(self._deliver)

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            if not self._buffered:
                self._loop.call_soon(self._lose, None)

    def abort(self) -> None:
        if not self._aborted:
            self._closing = self._aborted = True
            self._loop.call_soon(self._lose, None)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"peername": (self.address, 40_000), "sockname": ("127.0.0.1", 8080)}.get(name, default)

    # The other end's side

    @property
    def aborted(self) -> bool:
        """It was broken off, not closed: what was written may not have arrived, and no proper end has."""
        return self._aborted or self._broken

    def feed(self, data: bytes) -> None:
        """The other end sends; read at once unless reading is paused."""
        self._inbox.append(data)
        self._deliver()

    def end(self) -> None:
        """The other end closes its side."""
        self._inbox.append(None)
        self._deliver()

    def reset(self) -> None:
        """The other end breaks off. Not noticed by one that neither reads nor has anything to write."""
        self._inbox.clear()
        self._broken = True
        if self._paused and not self._buffered:
            return
        self._loop.call_soon(self._lose, ConnectionResetError())

    def read_on(self) -> None:
        """The other end reads again, all there is."""
        self.reads_nothing = False
        self._buffered = 0
        if self._pressed:
            self._pressed = False
            if not self.lost:
                self._loop.guarded(self.protocol.resume_writing)
        if self._closing:
            self._loop.call_soon(self._lose, None)

    def _press(self) -> None:
        if self._buffered > HIGH_WATER_BYTES and not self._pressed and not self.lost:
            self._pressed = True
            self._loop.guarded(self.protocol.pause_writing)

    def _deliver(self) -> None:
        while self._inbox and not self._paused and not self._closing:
            data = self._inbox.popleft()
            if data is not None:
                self._loop.guarded(self.protocol.data_received, data)
            elif not self.protocol.eof_received():
                self.close()

    def _lose(self, error: Exception | None) -> None:
        if not self.lost:
            self._closing = True
            # As uvloop: what the protocol does within connection_lost is not yet too late.
            self._loop.guarded(self.protocol.connection_lost, error)
            self.lost = True
