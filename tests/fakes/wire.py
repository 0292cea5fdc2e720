"""One end of a TCP connection under a test's full control: exact bytes out, exact bytes in, and how it ended."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from typing import Literal

LIMIT_S = 60.0
"""The longest that any test waits for a fact: none takes a second, but on a machine that is busy with other things."""


class Ended(Exception):
    """The connection ended before what was waited for had arrived. `got`: the bytes left over."""

    def __init__(self, how: str, got: bytes) -> None:
        super().__init__(f"{how} after {got[:200]!r}")
        self.how = how
        self.got = got


class Wire(asyncio.Protocol):
    """Keeps what arrives until it is asked for. It stays half open when the other end closes."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport
        self.buffer = bytearray()
        self.received = 0
        """Bytes that ever arrived."""
        self.reads = 0
        """Pieces in which they arrived."""
        self.ended: Literal["", "eof", "reset"] = ""
        """How the other end finished, empty while it has not."""
        self.tls = False
        self._changed = asyncio.Event()
        self._full = False

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        self.transport.set_write_buffer_limits(0)
        self.tls = transport.get_extra_info("sslcontext") is not None

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        self.received += len(data)
        self.reads += 1
        self._changed.set()

    def eof_received(self) -> bool:
        self.ended = self.ended or "eof"
        self._changed.set()
        return not self.tls

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended = self.ended or ("reset" if exc is not None else "eof")
        self._full = False
        self._changed.set()

    def pause_writing(self) -> None:
        self._full = True

    def resume_writing(self) -> None:
        self._full = False
        self._changed.set()

    # Writing

    def send(self, data: bytes) -> None:
        """Write at once, as one write. Raises Ended when this end is closed already."""
        if self.transport.is_closing():
            raise Ended(self.ended, bytes(self.buffer))
        self.transport.write(data)

    async def drip(self, data: bytes, size: int = 1) -> None:
        """Write in pieces of `size` bytes, giving the loop, which is the router's too, two turns to read each."""
        for start in range(0, len(data), size):
            self.send(data[start : start + size])
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    async def drain(self) -> None:
        """Wait until the kernel has taken everything. Raises Ended when the connection ends first."""
        await self._until(lambda: not self._full)
        if self.transport.is_closing():
            raise Ended(self.ended, bytes(self.buffer))

    @property
    def full(self) -> bool:
        """Whether the kernel takes nothing more at present."""
        return self._full

    def half_close(self) -> None:
        """Say that nothing more will be sent."""
        self.transport.write_eof()

    def close(self) -> None:
        """An ordinary close."""
        self.transport.close()

    def reset(self) -> None:
        """Break off with a TCP reset."""
        sock = self.transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    # Reading

    def stop_reading(self) -> None:
        self.transport.pause_reading()

    def read_on(self) -> None:
        self.transport.resume_reading()

    async def exactly(self, size: int) -> bytes:
        """The next `size` bytes. Raises Ended when there are fewer."""
        await self._until(lambda: len(self.buffer) >= size or bool(self.ended))
        if len(self.buffer) < size:
            raise Ended(self.ended, bytes(self.buffer))
        return self._take(size)

    async def up_to(self, mark: bytes) -> bytes:
        """Everything up to and with `mark`. Raises Ended when it does not come."""
        await self._until(lambda: mark in self.buffer or bool(self.ended))
        if mark not in self.buffer:
            raise Ended(self.ended, bytes(self.buffer))
        return self._take(self.buffer.index(mark) + len(mark))

    async def some(self) -> bytes:
        """Whatever there is, at least one byte; nothing when the connection has ended."""
        await self._until(lambda: bool(self.buffer) or bool(self.ended))
        return self._take(len(self.buffer))

    async def rest(self) -> bytes:
        """Everything until the other end closes. Raises Ended when it resets instead."""
        await self._until(lambda: bool(self.ended))
        if self.ended == "reset":
            raise Ended("reset", bytes(self.buffer))
        return self._take(len(self.buffer))

    async def end(self) -> str:
        """Wait until the other end has finished; says how."""
        await self._until(lambda: bool(self.ended))
        return self.ended

    def _take(self, size: int) -> bytes:
        data = bytes(self.buffer[:size])
        del self.buffer[:size]
        return data

    async def _until(self, ready: Callable[[], bool]) -> None:
        try:
            async with asyncio.timeout(LIMIT_S):
                while not ready():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise AssertionError(f"still waiting after {LIMIT_S} s; buffered: {bytes(self.buffer[-200:])!r}") from None


async def eventually(holds: Callable[[], object], what: str = "") -> None:
    """Wait for a fact that gives no signal. AssertionError after the limit."""
    deadline = asyncio.get_running_loop().time() + LIMIT_S
    while not holds():
        if asyncio.get_running_loop().time() > deadline:
            raise AssertionError(f"not within {LIMIT_S} s: {what or holds}")
        await asyncio.sleep(0.005)
