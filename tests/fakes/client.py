"""A client whose every byte is the test's, and that believes nothing it is answered."""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass, field

from tests.fakes.wire import Ended, Wire

Headers = list[tuple[str, str]]


@dataclass(slots=True)
class Answer:
    """One HTTP answer as it came."""

    version: str
    status: int
    phrase: str
    headers: Headers
    """Names in lower case, in order."""
    body: bytes = b""
    chunks: list[bytes] = field(default_factory=list)
    """Payloads of the chunks, when it was chunked."""
    trailers: bytes = b""
    interims: list[Answer] = field(default_factory=list)
    """1xx answers that came before."""

    def values(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key == name]

    def header(self, name: str) -> str | None:
        """The only value of a header; AssertionError when it is there twice."""
        values = self.values(name)
        assert len(values) < 2, f"{name} came {len(values)} times: {values}"
        return values[0] if values else None


def parse_head(raw: bytes) -> Answer:
    """An answer's head, up to and with the empty line."""
    first, *lines = raw.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    version, status, phrase = first.split(" ", 2)
    headers = []
    for line in lines:
        name, colon, value = line.partition(":")
        assert colon, f"not a header: {line!r}"
        assert name == name.strip(), f"space around the name: {line!r}"
        headers.append((name.lower(), value.strip()))
    return Answer(version, int(status), phrase, headers)


class RawClient(Wire):
    """A connection to the router."""

    @classmethod
    async def connect(cls, port: int, *, tls: ssl.SSLContext | None = None) -> RawClient:
        loop = asyncio.get_running_loop()
        _, client = await loop.create_connection(cls, "127.0.0.1", port, ssl=tls)
        return client

    async def head(self) -> Answer:
        """The next head, 1xx ones included. Raises Ended."""
        return parse_head(await self.up_to(b"\r\n\r\n"))

    async def chunk(self) -> bytes:
        """The payload of the next chunk, empty for the last one (its trailers are left to be read). Raises Ended."""
        size = int(await self.up_to(b"\r\n"), 16)
        if size == 0:
            return b""
        data = await self.exactly(size + 2)
        assert data.endswith(b"\r\n"), data[-20:]
        return data[:-2]

    async def answer(self, *, head_only: bool = False) -> Answer:
        """The next whole answer. Raises Ended when the connection ends before the answer says it is complete."""
        interims = []
        while (answer := await self.head()).status < 200:
            interims.append(answer)
        answer.interims = interims
        lengths = answer.values("content-length")
        coding = answer.header("transfer-encoding")
        assert len(lengths) < 2, lengths
        assert coding in (None, "chunked")
        assert not (lengths and coding), "both length and chunks"
        if head_only or answer.status in (204, 304):
            return answer
        if coding:
            while data := await self.chunk():
                answer.chunks.append(data)
            answer.body = b"".join(answer.chunks)
            while (line := await self.up_to(b"\r\n")) != b"\r\n":
                answer.trailers += line
        elif lengths:
            answer.body = await self.exactly(int(lengths[0]))
        else:
            answer.body = await self.rest()
        return answer

    async def ask(self, request: bytes) -> Answer:
        """Send a request and return its whole answer."""
        self.send(request)
        return await self.answer(head_only=request.startswith(b"HEAD "))

    async def refused(self) -> tuple[Answer, bytes]:
        """The next answer and whatever follows it until the end, which must be the connection's last."""
        answer = await self.answer()
        return answer, await self.rest()


def get(target: str = "/v1/models", *headers: str, version: str = "1.1", method: str = "GET") -> bytes:
    """A request without a body."""
    lines = [f"{method} {target} HTTP/{version}", "Host: warmroute.test", *headers]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n"


def post(
    target: str = "/v1/chat/completions",
    body: bytes = b"{}",
    *headers: str,
    version: str = "1.1",
    chunks: list[bytes] | None = None,
) -> bytes:
    """A request with a body of a length, or in `chunks`."""
    if chunks is None:
        framing = f"Content-Length: {len(body)}"
    else:
        framing = "Transfer-Encoding: chunked"
        body = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
    lines = [f"POST {target} HTTP/{version}", "Host: warmroute.test", "Content-Type: application/json", framing]
    return "\r\n".join([*lines, *headers]).encode("latin-1") + b"\r\n\r\n" + body


__all__ = ["Answer", "Ended", "RawClient", "get", "parse_head", "post"]
