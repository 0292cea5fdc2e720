"""Stand-in replicas that cost as little as possible: the far end of the load.

One process serves several ports. A POST gets a short JSON answer or, when its body holds `"stream":true`, a
stream of server-sent events: `--chunks` of them, `--gap-ms` apart, the first after `--ttft-ms`. Each event
carries the monotonic time in nanoseconds at which it was written, so that a client on the same host can tell
how long it was on its way. The GETs that routers probe are answered too.

    python -m benchmarks.backend --ports 9001,9002 --chunks 100 --gap-ms 20 --ttft-ms 5
"""

from __future__ import annotations

import argparse
import asyncio
import time
from dataclasses import dataclass
from functools import partial
from typing import cast

import httptools
import uvloop

JSON_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
    b"cache-control: no-cache\r\ntransfer-encoding: chunked\r\n\r\n"
)
ANSWER = (
    b'{"port":%d,"object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant","content":"ok"},'
    b'"finish_reason":"stop"}],"usage":{"prompt_tokens":1,"completion_tokens":1,"total_tokens":2}}'
)
EVENT = (
    b'data: {"object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"xxxxxxxxxxxxxxxxxxxxxxxx"}}],'
    b'"n":%d,"t":%d}\n\n'
)
DONE = b"data: [DONE]\n\n"
MODEL_INFO = b'{"model_path":"bench","is_generation":true}'
SERVER_INFO = b'{"model_path":"bench","served_model_name":"bench"}'
PROBES = {
    b"/health": b"{}",
    b"/health_generate": b"{}",
    b"/ready": b"{}",
    b"/v1/models": b'{"object":"list","data":[{"id":"bench","object":"model"}]}',
    b"/get_model_info": MODEL_INFO,
    b"/model_info": MODEL_INFO,
    b"/get_server_info": SERVER_INFO,
    b"/server_info": SERVER_INFO,
    b"/get_load": b'[{"dp_rank":0,"num_reqs":0,"num_waiting_reqs":0,"num_tokens":0}]',
    b"/v1/loads": b'{"loads":[{"dp_rank":0,"num_running_reqs":0,"num_waiting_reqs":0}]}',
    b"/metrics": (
        b'sglang:num_running_reqs{model_name="bench"} 0.0\n'
        b'sglang:num_queue_reqs{model_name="bench"} 0.0\n'
        b'sglang:token_usage{model_name="bench"} 0.1\n'
    ),
}
"""What routers ask engines about themselves, by path; always the same idle answer."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How a stream runs."""

    chunks: int
    gap_s: float
    ttft_s: float


class Replica(asyncio.Protocol):
    """One keep-alive connection from a router."""

    def __init__(self, port: int, pace: Pace) -> None:
        self._answer = ANSWER % port
        self._pace = pace
        self._loop = asyncio.get_running_loop()
        self._alive = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's has the methods but not the base class
        self._parser = httptools.HttpRequestParser(self)
        self._alive = True

    def connection_lost(self, exc: Exception | None) -> None:
        self._alive = False

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass
        except httptools.HttpParserError:
            self._transport.close()

    def on_message_begin(self) -> None:
        self._url = b""
        self._stream = False

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"expect":
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        # Routers that write the body anew may put a space after the colon.
        if not self._stream and (b'"stream":true' in body or b'"stream": true' in body):
            self._stream = True

    def on_message_complete(self) -> None:
        if self._stream:
            self._loop.call_later(self._pace.ttft_s, self._begin)
            return
        body = PROBES.get(self._url.partition(b"?")[0], self._answer)
        self._transport.write(JSON_HEAD % len(body) + body)

    def _begin(self) -> None:
        if self._alive:
            self._transport.write(STREAM_HEAD)
            self._send(0)

    def _send(self, n: int) -> None:
        if not self._alive:
            return
        event = EVENT % (n, time.monotonic_ns())
        if n + 1 < self._pace.chunks:
            self._transport.write(b"%x\r\n%s\r\n" % (len(event), event))
            self._loop.call_later(self._pace.gap_s, self._send, n + 1)
        else:
            event += DONE
            self._transport.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(event), event))


async def serve(ports: list[int], pace: Pace) -> None:
    """Serve until the process is ended. Prints `ready` once all ports listen."""
    loop = asyncio.get_running_loop()
    for port in ports:
        await loop.create_server(partial(Replica, port, pace), "127.0.0.1", port, backlog=4096)
    print("ready", flush=True)
    await asyncio.Event().wait()


def main() -> None:
    cli = argparse.ArgumentParser(description="Stand-in replicas for benchmarks.")
    cli.add_argument("--ports", type=lambda text: [int(p) for p in text.split(",")], required=True)
    cli.add_argument("--chunks", type=int, default=100)
    cli.add_argument("--gap-ms", type=float, default=20.0)
    cli.add_argument("--ttft-ms", type=float, default=5.0)
    args = cli.parse_args()
    uvloop.run(serve(args.ports, Pace(args.chunks, args.gap_ms / 1e3, args.ttft_ms / 1e3)))


if __name__ == "__main__":
    main()
