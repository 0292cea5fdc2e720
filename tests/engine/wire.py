"""One HTTP/1.1 request on a connection of its own, down to the bytes."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import h11

LIMIT_S = 300
"""Of waiting for an answer: no proof, so large enough for the slowest machine."""


@dataclass
class Answer:
    """As much as came of an answer."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    whole: bool = False
    """Whether it ended as HTTP/1.1 has it end: the last chunk came, or as many bytes as announced."""


class Exchange:
    """A request that was sent, and its answer so far."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._parser = h11.Connection(h11.CLIENT)
        self.answer = Answer()

    @classmethod
    async def begin(cls, port: int, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> Exchange:
        """Connect to 127.0.0.1 and POST."""
        exchange = cls(*await asyncio.open_connection("127.0.0.1", port))
        data = json.dumps(body).encode()
        head = {"host": f"127.0.0.1:{port}", "content-type": "application/json", "content-length": str(len(data))}
        request = h11.Request(method="POST", target=path, headers=list((head | (headers or {})).items()))
        parser = exchange._parser
        exchange._writer.write(b"".join(parser.send(e) or b"" for e in (request, h11.Data(data), h11.EndOfMessage())))
        await exchange._writer.drain()
        return exchange

    async def first_data(self) -> None:
        """Wait for the first bytes of the answer's body."""
        async with asyncio.timeout(LIMIT_S):
            while not self.answer.body:
                assert await self._step(), f"the answer ended before its body began: {self.answer}"

    async def finish(self) -> Answer:
        """Wait for the end of the answer, good or bad, and close."""
        async with asyncio.timeout(LIMIT_S):
            while await self._step():
                pass
        await self.leave()
        return self.answer

    async def leave(self) -> None:
        """Close the connection, whatever is still to come."""
        self._writer.close()
        with suppress(ConnectionError):
            await self._writer.wait_closed()

    async def _step(self) -> bool:
        """Take in one event; False when there is none to come."""
        try:
            event = self._parser.next_event()
            while event is h11.NEED_DATA:
                self._parser.receive_data(await self._reader.read(65_536))
                event = self._parser.next_event()
        except (h11.RemoteProtocolError, ConnectionError):
            return False
        if isinstance(event, h11.Response):
            self.answer.status = event.status_code
            self.answer.headers = {name.decode(): value.decode() for name, value in event.headers}
        elif isinstance(event, h11.Data):
            self.answer.body += event.data
        elif isinstance(event, h11.EndOfMessage):
            self.answer.whole = True
        return isinstance(event, h11.Response | h11.InformationalResponse | h11.Data)


async def ask(port: int, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> Answer:
    """POST and wait for the whole answer."""
    return await (await Exchange.begin(port, path, body, headers)).finish()
