"""A store that another process of this machine serves on a unix socket: the one among the workers of a supervisor."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any, TypeVar

import msgspec

from policies.sharing import Note
from router.store import wire
from router.store.served import Answer, frame, read_frame
from router.store.store import Heard, Message, Remembered, StoreError

MAX_UNDER_WAY = 1024
"""Calls that wait for an answer; further ones fail at once."""

MAX_UNSENT_BYTES = 4 << 20
"""That the other end has not taken; further calls fail at once."""

T = TypeVar("T")

_answer = msgspec.msgpack.Decoder(Answer).decode


class RemoteStore:
    """One connection, made when it is wanted and again when it was lost. Calls do not wait for each other."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock = asyncio.Lock()
        """Held while connecting."""
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._numbers = count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}

    async def claim(self, note: Note) -> Sequence[Remembered]:
        return _read(wire.decode_remembered, await self._call("claim", wire.encode_note(note)))

    async def tell(self, message: Message) -> None:
        await self._call("tell", wire.encode_message(message))

    async def restore(self, notes: Sequence[Note]) -> None:
        await self._call("restore", wire.encode_notes(notes))

    async def hear(self, cursor: str, wait_s: float) -> Heard:
        messages, after, lost = await self._call("hear", (cursor, wait_s))
        return Heard([_read(wire.decode_message, each) for each in messages], after, lost)

    async def controls(self) -> Mapping[str, bytes]:
        controls: dict[str, bytes] = await self._call("controls", None)
        return controls

    async def epoch(self, offered: str) -> str:
        return str(await self._call("epoch", offered))

    async def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)

    async def _call(self, name: str, given: Any) -> Any:
        writer = self._writer or await self._connected()
        if writer.transport.is_closing():  # it is lost, and whoever reads has not been told yet
            raise self._error("the connection was closed")
        if len(self._waiting) >= MAX_UNDER_WAY:
            raise self._error(f"{MAX_UNDER_WAY} calls wait for its answers")
        if writer.transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            raise self._error("it does not take what it is told")
        number = next(self._numbers)
        answered: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answered
        try:
            writer.write(frame((number, name, given)))
            return await answered
        finally:
            self._waiting.pop(number, None)  # an answer that comes yet is for nobody

    async def _connected(self) -> asyncio.StreamWriter:
        async with self._lock:
            if self._writer is None:
                try:
                    reader, self._writer = await asyncio.open_unix_connection(self._path)
                except OSError as error:
                    raise self._error(error.strerror or str(error)) from None
                self._reading = asyncio.create_task(self._read(reader, self._writer))
            return self._writer

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Hand out answers until the connection ends, and then tell those that wait."""
        why = "the connection was closed"
        try:
            while True:
                number, answer, fault = _answer(await read_frame(reader))
                waiting = self._waiting.get(number)
                if waiting is None or waiting.done():
                    continue
                if fault is None:
                    waiting.set_result(answer)
                else:
                    waiting.set_exception(StoreError(fault))
        except EOFError:
            pass
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            why = str(error)
        finally:
            self._writer = None
            writer.close()
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(self._error(why))
            self._waiting.clear()

    def _error(self, why: str) -> StoreError:
        return StoreError(f"the supervisor's store at {self._path}: {why}: is the supervisor alive?")


def _read(decode: Callable[[bytes], T], data: bytes) -> T:
    try:
        return decode(data)
    except wire.WireError as error:
        raise StoreError(f"the supervisor's store: {error}: is it of another version?") from None
