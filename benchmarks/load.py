"""A closed-loop client that plays many agent sessions at once.

Each of `--concurrency` sessions keeps one connection and sends its next turn as soon as the last one ended,
until `--seconds` have passed. Prints one JSON object: requests, failures, time to the first byte and to the
last and, for streams, how long each chunk took from the stand-in's write to this client's read (one host, one
clock).

It shares the machine with the router, so it does little: one write per turn of bytes made beforehand, one parser
per connection, one search per read.

    python -m benchmarks.load --url http://127.0.0.1:8100/v1/chat/completions --stream --concurrency 64
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

import httptools
import uvloop

CHUNK = re.compile(rb'"n":(\d+),"t":(\d+)\}')
CHUNK_BYTES = 200
"""More than an event of the stand-in holds: as much of a read is kept as may be the head of a cut event."""
GRACE_S = 60.0
"""Turns that still run this long after the end are given up and counted as broken."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to send."""

    host: str
    port: int
    path: str
    stream: bool
    chunks: int
    concurrency: int
    seconds: float
    body_bytes: int
    ramp_s: float
    session_header: str

    def request(self, session: str) -> bytes:
        """Head and body of every turn of a session. Its name begins the prompt: no two sessions share a prefix."""
        head = '{"model":"bench","stream":%s,"messages":[{"role":"user","content":"' % (
            "true" if self.stream else "false"
        )
        tail = '"}]}'
        fill = max(0, self.body_bytes - len(head) - len(tail))
        prompt = (f"{session} " + "lorem ipsum dolor sit amet " * (fill // 27 + 1))[:fill]
        body = (head + prompt + tail).encode()
        return (
            f"POST {self.path} HTTP/1.1\r\nhost: {self.host}:{self.port}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n{self.session_header}: {session}\r\n\r\n"
        ).encode() + body


@dataclass(slots=True)
class Tally:
    """What was seen. Times in nanoseconds."""

    done: int = 0
    failed: int = 0
    broken_streams: int = 0
    open: int = 0
    peak_open: int = 0
    ttfb_ns: list[int] = field(default_factory=list)
    total_ns: list[int] = field(default_factory=list)
    transit_ns: list[int] = field(default_factory=list)
    statuses: dict[int, int] = field(default_factory=dict)


class Session(asyncio.Protocol):
    """One session's connection."""

    def __init__(self, plan: Plan, request: bytes, tally: Tally, deadline_ns: int) -> None:
        self._plan, self._request, self._tally, self._deadline_ns = plan, request, tally, deadline_ns
        self._loop = asyncio.get_running_loop()
        self._asking = False
        self.closed = self._loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's has the methods but not the base class
        self._parser = httptools.HttpResponseParser(self)
        self._next_turn()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._asking:
            self._end(broken=True)
        self.closed.set_result(None)

    def give_up(self) -> None:
        self._transport.abort()

    def _next_turn(self) -> None:
        if self._transport.is_closing():
            return
        self._started_ns = time.monotonic_ns()
        if self._started_ns >= self._deadline_ns:
            self._transport.close()
            return
        self._first_ns = 0
        self._chunks = 0
        self._cut = b""
        self._asking = True
        tally = self._tally
        tally.open += 1
        tally.peak_open = max(tally.peak_open, tally.open)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now_ns = time.monotonic_ns()
        if not self._first_ns:
            self._first_ns = now_ns
        if self._plan.stream:
            text = self._cut + data if self._cut else data
            end = 0
            for found in CHUNK.finditer(text):
                n, written_ns = found.groups()
                if int(n) == self._chunks:
                    self._chunks += 1
                self._tally.transit_ns.append(now_ns - int(written_ns))
                end = found.end()
            self._cut = text[max(end, len(text) - CHUNK_BYTES) :]
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.abort()

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        tally = self._tally
        tally.statuses[status] = tally.statuses.get(status, 0) + 1
        if status == 200 and self._plan.stream and self._chunks != self._plan.chunks:
            self._end(broken=True)
        elif status == 200:
            self._end(broken=False)
            tally.ttfb_ns.append(self._first_ns - self._started_ns)
            tally.total_ns.append(time.monotonic_ns() - self._started_ns)
            tally.done += 1
        else:
            self._asking = False
            tally.open -= 1
            tally.failed += 1
        # Asked here, not later: httptools says no once feed_data has returned.
        if self._parser.should_keep_alive():
            self._loop.call_soon(self._next_turn)
        else:
            self._transport.close()

    def _end(self, *, broken: bool) -> None:
        self._asking = False
        self._tally.open -= 1
        if broken and self._plan.stream:
            self._tally.broken_streams += 1
        elif broken:
            self._tally.failed += 1


async def play(number: int, plan: Plan, tally: Tally, deadline_ns: int) -> None:
    """One session, from its place in the ramp to the deadline; connects anew when it was closed on."""
    loop = asyncio.get_running_loop()
    await asyncio.sleep(number * plan.ramp_s)
    request = plan.request(f"s-{number}")
    while time.monotonic_ns() < deadline_ns:
        try:
            _, session = await loop.create_connection(
                lambda: Session(plan, request, tally, deadline_ns), plan.host, plan.port
            )
        except OSError:
            tally.failed += 1
            await asyncio.sleep(0.05)
            continue
        remaining_s = (deadline_ns - time.monotonic_ns()) / 1e9 + GRACE_S
        _, unfinished = await asyncio.wait([session.closed], timeout=remaining_s)
        if unfinished:
            session.give_up()
            await session.closed


def quantiles_ms(values_ns: Sequence[int]) -> dict[str, float]:
    """p50, p90, p99, p999 and the largest, in milliseconds; empty when there are no values."""
    if not values_ns:
        return {}
    ordered = sorted(values_ns)
    last = len(ordered) - 1
    picks = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999, "max": 1.0}
    return {name: round(ordered[min(last, int(q * len(ordered)))] / 1e6, 3) for name, q in picks.items()}


async def run(plan: Plan) -> dict[str, object]:
    """Play all sessions and report."""
    tally = Tally()
    started = time.monotonic()
    deadline_ns = time.monotonic_ns() + int(plan.seconds * 1e9)
    await asyncio.gather(*(play(i, plan, tally, deadline_ns) for i in range(plan.concurrency)))
    wall_s = time.monotonic() - started
    chunks = len(tally.transit_ns)
    return {
        "requests": tally.done,
        "failed": tally.failed,
        "broken_streams": tally.broken_streams,
        "statuses": tally.statuses,
        "peak_open": tally.peak_open,
        "wall_s": round(wall_s, 2),
        "requests_per_s": round(tally.done / wall_s, 1),
        "chunks": chunks,
        "chunks_per_s": round(chunks / wall_s, 1),
        "ttfb_ms": quantiles_ms(tally.ttfb_ns),
        "total_ms": quantiles_ms(tally.total_ns),
        "transit_ms": quantiles_ms(tally.transit_ns),
    }


def main() -> None:
    cli = argparse.ArgumentParser(description="A closed-loop client that plays many agent sessions.")
    cli.add_argument("--url", required=True)
    cli.add_argument("--stream", action="store_true")
    cli.add_argument("--chunks", type=int, default=100, help="chunks that a whole stream has")
    cli.add_argument("--concurrency", type=int, default=32)
    cli.add_argument("--seconds", type=float, default=8.0)
    cli.add_argument("--body-kb", type=int, default=1, help="size of a request's body, KiB")
    cli.add_argument("--ramp-ms", type=float, default=2.0, help="time between the starts of two sessions")
    cli.add_argument("--session-header", default="modal-session-id")
    args = cli.parse_args()
    url = urlsplit(args.url)
    plan = Plan(
        host=url.hostname or "127.0.0.1",
        port=url.port or 80,
        path=url.path or "/",
        stream=args.stream,
        chunks=args.chunks,
        concurrency=args.concurrency,
        seconds=args.seconds,
        body_bytes=args.body_kb * 1024,
        ramp_s=args.ramp_ms / 1e3,
        session_header=args.session_header,
    )
    print(json.dumps(uvloop.run(run(plan))))


if __name__ == "__main__":
    main()
