"""Requests and answers as random draws: proper ones, and what becomes of them when bytes are changed."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from random import Random

from tests.fakes.upstream import chunk

EVENTS = [
    b'data: {"id":"1","choices":[{"delta":{"content":"x"}}]}\n\n',
    b"data: [DONE]\n\n",
    b": comment\n\n",
    b'event: message_start\ndata: {"type":"message_start","message":{"usage":{"input_tokens":5}}}\n\n',
    b'event: response.created\ndata: {"type":"response.created","response":{}}\n\n',
    b'data: {"usage":{"prompt_tokens":7,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":4}}}\n\n',
    b'data: {"error": {"message": "no", "code": 400}}\n\n',
    b"\r\n",
    b"0\r\n\r\n",
    b"x" * 5000,
]
FULL = b'data: {"error": {"object": "error", "message": "The request queue is full.", "code": 503}}\n\n'
PATHS = [
    "/v1/chat/completions",
    "/v1/messages",
    "/v1/responses",
    "/generate",
    "/v1/embeddings",
    "/v1/models",
    "/unknown",
]
METHODS = ["POST"] * 6 + ["GET", "GET", "HEAD", "PUT", "DELETE", "OPTIONS"]
HEADERS = [
    "X-Fuzz: plain",
    "x-fuzz:  spaced \t",
    "X-FUZZ: ",
    "X-Fuzz: caf\xe9",
    "X-Session-Affinity: s1",
    "Connection: keep-alive",
    "Connection: close",
    "Connection: x-fuzz, te",
    "Keep-Alive: timeout=5",
    "TE: trailers",
    "Expect: 100-continue",
    "X-Request-Id: given",
    "X-Forwarded-For: 10.0.0.1",
    "Content-Encoding: gzip",
    "Accept: */*",
]
SPLICES = [
    b"\r\n", b"\n", b"\r", b" ", b"\t", b":", b"\x00", b"\xff", b";", b",", b"0\r\n\r\n", b"\r\n\r\n", b"-", b"+",
    b"Transfer-Encoding: chunked\r\n", b"Transfer-Encoding: identity\r\n", b"Transfer-Encoding : chunked\r\n",
    b"Content-Length: 3\r\n", b"Content-Length: 0\r\n", b"Content-Length: 99999999999999999999\r\n", b" folded\r\n",
    b"Connection: close\r\n", b"Connection: upgrade\r\nUpgrade: websocket\r\n", b"Host: b\r\n", b"Expect: x\r\n",
    b"ffffffffffffffff\r\n", b"10000000000000000\r\n", b"5;a=b\r\n", b"chunked", b"HTTP/1.0", b"HTTP/2.0", b"HTTP/1.1",
    b"GET /smuggled HTTP/1.1\r\nHost: a\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi",
    b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 101 Switching Protocols\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"x" * 300,
]  # fmt: skip


@dataclass(slots=True)
class Reply:
    """One answer as a replica sends it."""

    raw: bytes
    honest: bool
    """Nothing of it was changed."""
    ends: bool
    """The connection's end is the body's."""


def request(rng: Random, tag: str) -> bytes:
    """A proper request whose target carries `tag`."""
    method = rng.choice(METHODS)
    version = "1.0" if rng.random() < 0.08 else "1.1"
    lines = [f"{method} {rng.choice(PATHS)}?{tag} HTTP/{version}", "Host: a"]
    lines += rng.sample(HEADERS, rng.choice((0, 0, 1, 2, 4)))
    body = b""
    if method in ("POST", "PUT") or rng.random() < 0.05:
        parts = bodies(rng)
        if version == "1.1" and rng.random() < 0.4:
            lines.append(rng.choice(("Transfer-Encoding: chunked", "transfer-encoding:  Chunked ")))
            body = chunks(rng, parts)
        else:
            body = b"".join(parts)
            lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def bodies(rng: Random) -> list[bytes]:
    """Pieces of a body, none empty."""
    return [
        rng.choice(
            (b'{"model":"m","messages":[{"role":"user","content":"hi"}]}', b"\r\n", b"0\r\n\r\n", b"x" * 900, b"y")
        )
        for _ in range(rng.choice((0, 1, 1, 1, 2, 4)))
    ]


def chunks(rng: Random, parts: list[bytes]) -> bytes:
    """Chunked, now and then in one of the unusual ways that are allowed."""
    out = []
    for part in parts:
        plain = chunk(part)
        out.append(plain if rng.random() < 0.9 else rng.choice((b"00", b"")) + plain.replace(b"\r\n", b";a=b\r\n", 1))
    out.append(b"0\r\n" if rng.random() < 0.9 else b"000;x\r\n")
    if rng.random() < 0.1:
        out.append(b"X-Trailer: t\r\n")
    return b"".join([*out, b"\r\n"])


def answer(rng: Random, method: str, mark: bytes, liar: float) -> Reply:
    """An answer that carries `mark` in its body; with a chance of `liar` it is changed."""
    status = rng.choice((200, 200, 200, 200, 201, 204, 304, 400, 404, 429, 500, 503))
    out = [b""]
    for _ in range(rng.choice((0,) * 12 + (1, 2, 40))):
        out.append(rng.choice((b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n")))
    interims = len(out) - 1
    stream = rng.random() < 0.6
    parts = [mark, *rng.choices(EVENTS, k=rng.choice((0, 1, 2, 5)))]
    if stream and rng.random() < 0.1:
        parts = [FULL, mark]
    elif rng.random() < 0.3:
        parts.append(mark)
    version = rng.choice((b"1.1",) * 15 + (b"1.0",))
    head = b"HTTP/%b %d %b\r\n" % (version, status, rng.choice((b"OK", b"", b"Sehr Gut", b"Caf\xe9")))
    head += b"Content-Type: %b\r\n" % (b"text/event-stream; charset=utf-8" if stream else b"application/json")
    head += rng.choice((b"", b"", b"Connection: close\r\n", b"Connection: keep-alive\r\n", b"X-Fuzz: r\r\n"))
    framing = rng.choice(("length", "chunked", "chunked", "close"))
    bodiless = method == "HEAD" or status in (204, 304)
    ends = False
    if framing == "chunked" and version == b"1.1":
        out.append(head + b"Transfer-Encoding: chunked\r\n\r\n")
        out.append(b"" if bodiless else chunks(rng, parts))
    elif framing == "close" and not bodiless:
        ends = True
        out += [head + b"\r\n", *parts]
    else:
        out.append(head + b"Content-Length: %d\r\n\r\n" % sum(map(len, parts)))
        out += [] if bodiless else parts
    raw = b"".join(out)
    if rng.random() >= liar:
        return Reply(raw, interims <= 32, ends)
    how = rng.random()
    if how < 0.15:
        raw += rng.choice((b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\n", b"", b"\x00")) + b"<excess>"
    elif how < 0.3:
        raw, ends = raw[: rng.randrange(len(raw))], True
    elif how < 0.4:
        raw = rng.randbytes(rng.choice((1, 10, 100)))
    else:
        raw = mutated(rng, raw)
    return Reply(raw, False, ends or rng.random() < 0.5)


def mutated(rng: Random, raw: bytes) -> bytes:
    """With a few bytes changed, moved, added or gone."""
    data = bytearray(raw)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        at = _place(rng, data)
        how = rng.randrange(8)
        if how == 0 and data:
            data[at % len(data)] = rng.randrange(256)
        elif how == 1:
            del data[at : at + rng.choice((1, 1, 2, 5, 50))]
        elif how in (2, 3, 4):
            data[at:at] = rng.choice(SPLICES)
        elif how == 5:
            data[at:at] = data[at : at + rng.choice((1, 10, 100))]
        elif how == 6:
            lines = bytes(data).split(b"\r\n")
            other = rng.randrange(len(lines))
            lines.insert(rng.randrange(len(lines)), lines[other])
            data = bytearray(b"\r\n".join(lines))
        else:
            data = bytearray(bytes(data).replace(b"\r\n", b"\n", rng.choice((1, 2))))
    return bytes(data)


def _place(rng: Random, data: bytearray) -> int:
    """Anywhere, but rather where a line begins or ends."""
    if data and rng.random() < 0.6:
        at = data.find(b"\r\n", rng.randrange(len(data)))
        if at >= 0:
            return at + rng.choice((0, 0, 1, 2, 2))
    return rng.randrange(len(data) + 1)


def cut(rng: Random, raw: bytes) -> list[bytes]:
    """In pieces, as a network might cut it."""
    how = rng.random()
    if how < 0.4 or not raw:
        return [raw] if raw else []
    if how < 0.5 and len(raw) < 400:
        return [raw[at : at + 1] for at in range(len(raw))]
    if how < 0.75:
        pieces = raw.split(b"\r\n")
        glued = [piece + b"\r\n" for piece in pieces[:-1]] + [pieces[-1]]
        off = rng.choice((0, 0, 1))  # and sometimes between the two bytes of the line's end
        raw_ends = [0]
        for piece in glued:
            raw_ends.append(raw_ends[-1] + len(piece))
        places = sorted({max(0, end - off) for end in raw_ends[1:-1]} | {0, len(raw)})
        return [raw[a:b] for a, b in itertools.pairwise(places) if b > a]
    places = sorted({0, len(raw), *(rng.randrange(len(raw)) for _ in range(rng.choice((1, 2, 5))))})
    return [raw[a:b] for a, b in itertools.pairwise(places)]
