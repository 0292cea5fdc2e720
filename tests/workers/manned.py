"""A router of two workers, operated: which of them answered what, and which processes they are."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.control.test_metrics import Samples, parse
from tests.fakes.client import RawClient
from tests.fakes.operated import LIMIT_S, Operated
from tests.fakes.waiting import until

WORKERS = 2


@dataclass(slots=True)
class Stream:
    """A client in the middle of a stream."""

    client: RawClient
    worker: str
    """What the worker's request ids begin with."""
    replica: str


class Manned(Operated):
    """Started with all workers up."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        apart = httpx.Limits(max_keepalive_connections=0)
        self._client = httpx.AsyncClient(limits=apart, trust_env=False, timeout=LIMIT_S)

    def write(self, *, ids: str | None = None, **settings: Any) -> None:
        super().write(ids=ids, **{"workers": WORKERS} | settings)

    async def launch(self) -> None:
        """The router, with the configuration that is there: one worker serves."""
        await super().serve()

    async def serve(self, *flags: str, wait_for: str = "/readyz") -> None:
        await super().serve(*flags, wait_for=wait_for)
        await self.logged(f"{WORKERS} workers serve")

    async def turn(self, session: str) -> httpx.Response:
        """One whole turn over a connection of its own."""
        body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "word " * 50}]}
        url = f"{self.router.url}/v1/chat/completions"
        return await self._client.post(url, json=body, headers={"x-session-affinity": session})

    async def turns(self, count: int) -> list[httpx.Response]:
        """So many at once, each a session of its own."""
        return await asyncio.gather(*(self.turn(f"{number} of {count}") for number in range(count)))

    async def stop(self) -> None:
        await self._client.aclose()
        await super().stop()

    async def open(self, session: str) -> Stream:
        """A stream that has begun, and where."""
        client, head = await self.begin(session)
        return Stream(client, worker_of(head.header("x-request-id") or ""), head.header("x-warmroute-replica") or "")

    async def open_on_both(self, least: int) -> list[Stream]:
        """At least so many streams, with some on each worker: the kernel chooses."""
        streams: list[Stream] = []
        while len(streams) < least or len({stream.worker for stream in streams}) < WORKERS:
            streams.append(await self.open(f"stream {len(streams)}"))
            assert len(streams) < 100, "one worker gets none"
        return streams

    async def samples(self) -> Samples:
        return parse((await self.admin.get("/metrics")).raise_for_status().text)

    async def until(self, ask: Callable[[], Awaitable[Any]], holds: Callable[[Any], bool], what: str) -> Any:
        return await until(ask, holds, LIMIT_S, what)

    async def ready(self) -> None:
        """Wait until the router says so; workers have a second for it."""
        await self.until(
            lambda: self.admin.get("/readyz"),
            lambda answer: answer.status_code == 200,
            "a worker says that it is ready",
        )

    def pids(self) -> dict[int, int]:
        """The workers' processes, by their number."""
        found: dict[int, int] = {}
        for pid in self.router.family():
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            if "router.workers" in words:
                found[int(words[words.index("router.workers") + 1].partition("/")[0])] = pid
        return found

    def errors(self) -> list[dict[str, Any]]:
        """What the log tells of as an error."""
        lines = [json.loads(line) for line in self.router.log.read_text().splitlines() if line.startswith('{"time": ')]
        return [line for line in lines if line["level"] == "error"]


def worker_of(request_id: str) -> str:
    """What the ids that a process gives requests begin with."""
    return request_id.partition("-")[0]
