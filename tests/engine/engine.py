"""Real SGLang servers on the CPU, as scripts/engine/start runs them."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.fakes.process import ROOT, Process, free_port
from tests.fakes.waiting import until

LOGS = ROOT / ".engine" / "logs"

RUNNING = 4
"""Requests an engine runs at once (--max-running-requests)."""
QUEUED = 4
"""Requests an engine lets wait (--max-queued-requests)."""
PAGE_TOKENS = 16
"""What cached_tokens is a multiple of (--page-size in scripts/engine/start)."""
CAPACITY_TOKENS = 20_000
"""KV tokens of an engine (--max-total-tokens in scripts/engine/start)."""
FILLER_TOKENS = 4_500
"""Of each request that fills an engine: as long as RUNNING of them fit the KV pool; about 25 seconds on 2 cores."""

START_LIMIT_S = 240
STOP_LIMIT_S = 60
"""An idle server ends 6 to 9 s after SIGTERM: it looks every 5 s whether a request is left."""
SETTLE_LIMIT_S = 60


@dataclass(frozen=True)
class Load:
    """What GET /v1/loads said."""

    running: int
    waiting: int


IDLE = Load(0, 0)
FULL = Load(RUNNING, QUEUED)


class Engine:
    """One SGLang server on a port of its own, which it keeps across restarts."""

    def __init__(self, name: str, ranks: int = 1, *flags: str) -> None:
        """`ranks`: its data-parallel size. `flags` are added to those that all have."""
        assert (ROOT / ".engine/installed").exists(), "no engine is installed: run scripts/engine/install"
        self.ranks = ranks
        self._flags = flags
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = LOGS / f"{name}.log"
        self.process = self._launch()

    def _launch(self) -> Process:
        limits = ("--max-running-requests", str(RUNNING), "--max-queued-requests", str(QUEUED), *self._flags)
        start = [str(ROOT / "scripts/engine/start"), str(self.port), *limits]
        if self.ranks > 1:
            # On the CPU SGLang wants to be told where each rank's threads run.
            places = "|".join(str(rank % (os.cpu_count() or 1)) for rank in range(self.ranks))
            start = ["env", f"SGLANG_CPU_OMP_THREADS_BIND={places}", *start, "--dp-size", str(self.ranks)]
        return Process(start, self._log)

    def restart(self) -> None:
        """End it if it has not ended, and start it again on the same port. `wait_ready` is the caller's."""
        self.process.stop()
        self.process = self._launch()

    def wait_ready(self) -> None:
        """Raises AssertionError with the log's tail when it ends or is not ready in time."""
        self.process.wait_ok(f"{self.url}/ready", START_LIMIT_S)

    def stop(self) -> None:
        self.process.stop(STOP_LIMIT_S)

    def scheduler_pid(self) -> int:
        """The process that computes, a child of the server."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return next(int(pid) for pid in children if b"scheduler" in Path(f"/proc/{pid}/cmdline").read_bytes())

    async def ready(self, client: httpx.AsyncClient) -> bool:
        """Whether it takes requests and is not about to end."""
        try:
            return self.process.alive and (await client.get(f"{self.url}/ready")).status_code == 200
        except httpx.TransportError:  # it is ending: its port is closed before its process has gone
            return False

    async def load(self, client: httpx.AsyncClient) -> Load:
        answer = await client.get(f"{self.url}/v1/loads", params={"include": "core"})
        (report,) = answer.raise_for_status().json()["loads"]
        return Load(report["num_running_reqs"], report["num_waiting_reqs"])

    async def wait_load(self, client: httpx.AsyncClient, load: Load, limit_s: float = SETTLE_LIMIT_S) -> None:
        """Wait until it runs and queues exactly so many requests."""
        await until(lambda: self.load(client), lambda seen: seen == load, limit_s, f"{load} on {self.url}")

    async def aborted(self, client: httpx.AsyncClient) -> int:
        """Requests aborted since it started, from its own metrics; they tell of none until there is one."""
        text = (await client.get(f"{self.url}/metrics")).text
        name = "sglang:num_aborted_requests_total{"
        return round(sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name)))

    async def settle(self, client: httpx.AsyncClient) -> None:
        """Abort whatever runs and wait until it is idle."""
        (await client.post(f"{self.url}/abort_request", json={"abort_all": True})).raise_for_status()
        await self.wait_load(client, IDLE)

    @asynccontextmanager
    async def filled(self, client: httpx.AsyncClient) -> AsyncIterator[None]:
        """Every place in its batch and its queue taken, by requests of its own that come past the router."""

        async def occupy(number: int) -> None:
            body = {"model": "tiny", "prompt": f"filler {number}", "max_tokens": FILLER_TOKENS, "ignore_eos": True}
            await client.post(f"{self.url}/v1/completions", json=body)

        tasks: list[asyncio.Task[None]] = []
        try:
            # Not all at once: the limit holds for what has not been put in the batch yet.
            tasks += [asyncio.create_task(occupy(n)) for n in range(RUNNING)]
            await self.wait_load(client, Load(RUNNING, 0))
            tasks += [asyncio.create_task(occupy(n)) for n in range(RUNNING, RUNNING + QUEUED)]
            await self.wait_load(client, FULL)
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.settle(client)


@contextmanager
def serving(*engines: Engine) -> Iterator[None]:
    """Ready when it begins, some may have been ended since; all of them end together, in order if they can."""
    try:
        for engine in engines:
            engine.wait_ready()
        yield
    finally:
        for engine in engines:
            if engine.process.alive:
                engine.process.signal(signal.SIGTERM)
        for engine in engines:
            engine.stop()
