"""A store served to other processes of this machine on a unix socket. `router.store.remote` asks there.

Frames of a length, 4 bytes, and a msgpack array: `(number, call, what is given)` one way, `(number, answer, fault)` the
other. Calls of a connection are done in their order, but for `hear`: what waits must not hold up a `claim`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from router.store import wire
from router.store.store import Store, StoreError

log = logging.getLogger("warmroute.store")

MAX_FRAME_BYTES = 64 << 20
"""Far more than the messages that are heard at once: notes and loads in them are bounded by who tells them."""

MAX_HEARS = 16
"""Of one connection at once. A router has one, and gives up those that it does not wait for any more."""

Call = tuple[int, str, Any]
Answer = tuple[int, Any, str | None]

_call = msgspec.msgpack.Decoder(Call).decode
_encode = msgspec.msgpack.Encoder().encode


def frame(content: Call | Answer) -> bytes:
    """The bytes of one frame."""
    data = _encode(content)
    return len(data).to_bytes(4, "big") + data


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """What is in the next frame. Raises EOFError at the end, and ValueError for a frame that is too long."""
    size = int.from_bytes(await reader.readexactly(4), "big")
    if size > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {size} bytes, more than {MAX_FRAME_BYTES}")
    return await reader.readexactly(size)


class Served:
    """A store at a path, which must be in a directory that nobody else can reach."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self, path: str) -> None:
        """Listen there. Raises OSError."""
        self._server = await asyncio.start_unix_server(self._connected, path)

    async def stop(self) -> None:
        """Listen no more, and end all connections."""
        if self._server is not None:
            self._server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            await _Connection(self._store, reader, writer).serve()
        except (EOFError, OSError, asyncio.CancelledError):
            pass  # the other end has gone, or we stop: in either case nobody waits for more
        except (ValueError, msgspec.MsgspecError) as error:
            log.error("a client of the store makes no sense, and is left: %s", error)
        finally:
            self._connections.discard(task)
            writer.close()


class _Connection:
    """One client."""

    def __init__(self, store: Store, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._store = store
        self._reader = reader
        self._writer = writer
        self._hears: dict[int, asyncio.Task[None]] = {}
        """By number of the call, the oldest first."""
        self._calls: dict[str, Callable[[Any], Awaitable[Any]]] = {
            "claim": self._claim,
            "tell": self._tell,
            "restore": self._restore,
            "hear": self._hear,
            "controls": self._controls,
            "epoch": store.epoch,
        }

    async def serve(self) -> None:
        """Answer until the client goes. Raises what reading does."""
        try:
            while True:
                number, name, given = _call(await read_frame(self._reader))
                if name not in self._calls:
                    raise ValueError(f"unknown call {name!r}")
                if name != "hear":
                    await self._answer(number, name, given)
                    continue
                if len(self._hears) >= MAX_HEARS:
                    self._hears.pop(next(iter(self._hears))).cancel()
                self._hears[number] = asyncio.create_task(self._answer(number, name, given))
        finally:
            for task in self._hears.values():
                task.cancel()
            await asyncio.gather(*self._hears.values(), return_exceptions=True)

    async def _answer(self, number: int, name: str, given: Any) -> None:
        try:
            answer: Answer = (number, await self._calls[name](given), None)
        except (StoreError, ValueError, TypeError) as error:  # the latter two of what makes no sense
            answer = (number, None, str(error))
        self._hears.pop(number, None)
        self._writer.write(frame(answer))
        with contextlib.suppress(OSError):  # the other end has gone, as reading tells, too
            await self._writer.drain()  # who asks and does not listen is not asked for more

    async def _claim(self, given: bytes) -> bytes:
        return wire.encode_remembered(await self._store.claim(wire.decode_note(given)))

    async def _tell(self, given: bytes) -> None:
        await self._store.tell(wire.decode_message(given))

    async def _restore(self, given: bytes) -> None:
        await self._store.restore(wire.decode_notes(given))

    async def _hear(self, given: tuple[str, float]) -> tuple[list[bytes], str, bool]:
        cursor, wait_s = given
        heard = await self._store.hear(cursor, wait_s)
        return [wire.encode_message(message) for message in heard.messages], heard.cursor, heard.lost

    async def _controls(self, _: None) -> dict[str, bytes]:
        return dict(await self._store.controls())
