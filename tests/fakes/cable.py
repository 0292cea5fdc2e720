"""What lies between a client and a server: it can be slow, it can be cut without a sign to either, and it can reset."""

from __future__ import annotations

import asyncio
import socket
import struct

CHUNK_BYTES = 65_536


class Cable:
    """From a free port of 127.0.0.1 to a unix socket. Whatever is under way when it is cut is lost."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.delay_s = 0.0
        """Of every read's worth of bytes, each way."""
        self._whole = asyncio.Event()
        self._whole.set()
        self._ways: set[asyncio.Task[None]] = set()
        self._near: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> int:
        """Its port."""
        self._server = await asyncio.start_server(self._joined, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        self._end()
        await asyncio.gather(*self._ways, return_exceptions=True)

    def cut(self) -> None:
        """Connections stand, new ones are taken, and nothing comes through."""
        self._whole.clear()

    def mend(self) -> None:
        """New connections are as ever. Those that lost something end."""
        self._end()
        self._whole.set()

    def reset(self) -> None:
        """End connections as what keeps no idle ones does."""
        for writer in self._near:
            at_once = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
        self._end()

    def _end(self) -> None:
        for way in self._ways:
            way.cancel()

    async def _joined(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._ways.add(task)
        self._near.add(writer)
        try:
            await self._whole.wait()
            far_reader, far_writer = await asyncio.open_unix_connection(self._path)
            try:
                async with asyncio.TaskGroup() as both:
                    both.create_task(self._way(reader, far_writer))
                    both.create_task(self._way(far_reader, writer))
            finally:
                far_writer.transport.abort()
        except (OSError, asyncio.CancelledError, ExceptionGroup):
            pass  # the end of one way is the end of both
        finally:
            writer.transport.abort()
            self._ways.discard(task)
            self._near.discard(writer)

    async def _way(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(CHUNK_BYTES):
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
            if self._whole.is_set():
                writer.write(data)
                await writer.drain()
        raise ConnectionError("this end has closed")
