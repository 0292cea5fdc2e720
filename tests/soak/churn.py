"""What is done to replicas and to the router meanwhile: one thing at a time, so that somebody can always serve."""

from __future__ import annotations

import asyncio
import signal
import sys
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import httpx
import yaml

from tests.fakes.process import Process, Router, free_port
from tests.soak.ledger import Ledger

POLICIES: list[dict[str, Any]] = [
    {"name": "session_affinity"},
    {"name": "least_loaded"},
    {"name": "session_affinity", "shadow": "dual_choice"},
    {"name": "rendezvous"},
    {"name": "dual_choice", "shadow": {"name": "session_affinity"}},
    {"name": "session_affinity", "hysteresis_s": 2},
]
BACK_S = 20.0
"""By then a replica that was started again must be ready."""


class Emulated(Process):
    """One emulated replica as a process that can be killed and comes back on the same port."""

    def __init__(self, port: int, log: Path) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        command: list[str | Path] = [sys.executable, "-m", "sim.emulator", "--port", str(port), "--time-scale", "0.1"]
        super().__init__([*command, "--default-include-usage"], log)
        self.wait_line(lambda line: line.startswith("ready"), BACK_S)


class Churn:
    """The fleet, and what happens to it."""

    def __init__(self, ledger: Ledger, rng: Random, count: int, folder: Path) -> None:
        self._ledger = ledger
        self._rng = rng
        self._folder = folder
        self.replicas = [Emulated(free_port(), folder / f"replica-{n}.log") for n in range(count)]
        self.config = folder / "config.yaml"
        self.router: Router
        self._turn = 0

    def settings(self) -> dict[str, Any]:
        """The configuration at the moment; every time another policy and other limits."""
        rng = self._rng
        return {
            "policy": rng.choice(POLICIES),
            "response_headers": True,
            "directory": {"max_sessions": 300},
            "replicas": [{"url": replica.url, "weight": rng.choice((1.0, 2.0))} for replica in self.replicas],
            "timeouts": {"first_byte_s": 30, "idle_s": 20, "keep_alive_s": rng.choice((60, 70, 80))},
            "health": {"interval_s": 0.5, "open_max_s": 10},  # each fails every minute: no reason to give up on any
            "retries": {"budget_burst": 50},
            "limits": {"body_bytes": rng.choice((32, 64)) << 20},
            # Few enough that clients wait, many enough that nobody waits for so long that it is refused.
            "admission": {"max_running": rng.choice((0, 6)), "max_running_per_replica": rng.choice((0, 2, 4))},
        }

    def write(self) -> None:
        """Put a new configuration in the file's place, as an editor would: whole or not at all."""
        new = self.config.with_suffix(".new")
        new.write_text(yaml.safe_dump(self.settings()))
        new.replace(self.config)

    async def run(self) -> None:
        """One thing after another, without end."""
        things = [self._kill, self._reload, self._drain, self._switch, self._stall, self._cut, self._reload]
        things += [self._fail, self._switch, self._unready, self._order]
        while True:
            await asyncio.sleep(self._rng.uniform(1.0, 4.0))
            thing = things[self._turn % len(things)]
            self._turn += 1
            self._ledger.counts["churn"] += 1
            await thing(self._rng.randrange(len(self.replicas)))

    def stop(self) -> None:
        """End the replicas."""
        for replica in self.replicas:
            with suppress(ProcessLookupError):
                replica.signal(signal.SIGCONT)
                replica.signal(signal.SIGKILL)
            replica.stop()

    # What may happen to a replica

    async def _kill(self, number: int) -> None:
        """Dies, and comes back."""
        fault = self._ledger.begin(self.replicas[number].url, "kill")
        self.replicas[number].signal(signal.SIGKILL)
        await asyncio.to_thread(self.replicas[number].stop)
        await asyncio.sleep(self._rng.uniform(0, 3))
        await self._start(number)
        self._ledger.end(fault)

    async def _drain(self, number: int) -> None:
        """Is told to stop, as by Kubernetes: finishes what it has, and ends."""
        replica = self.replicas[number]
        fault = self._ledger.begin(replica.url, "terminate")
        replica.signal(signal.SIGTERM)
        await asyncio.to_thread(replica.wait_end, 60)
        await asyncio.to_thread(replica.stop)
        await self._start(number)
        self._ledger.end(fault)

    async def _stall(self, number: int) -> None:
        """Stands still for some seconds, all of it."""
        replica = self.replicas[number]
        fault = self._ledger.begin(replica.url, "stall")
        replica.signal(signal.SIGSTOP)
        await asyncio.sleep(self._rng.uniform(0.5, 4))
        replica.signal(signal.SIGCONT)
        await self._ready(replica.url)
        self._ledger.end(fault)

    async def _cut(self, number: int) -> None:
        """Its streams break off after a few events."""
        await self._fault(number, "cut", {"die_mid_stream_after": 3}, {"die_mid_stream_after": None})

    async def _fail(self, number: int) -> None:
        """Answers 500."""
        await self._fault(number, "status 500", {"status": 500}, {"status": None})

    async def _unready(self, number: int) -> None:
        """Says that it is not ready, and serves all the same."""
        await self._fault(number, "unready", {"ready": False}, {"ready": True})

    async def _fault(self, number: int, what: str, begin: dict[str, object], end: dict[str, object]) -> None:
        url = self.replicas[number].url
        fault = self._ledger.begin(url, what)
        async with httpx.AsyncClient(trust_env=False) as client:
            (await client.post(f"{url}/_emulator/faults", json=begin)).raise_for_status()
            await asyncio.sleep(self._rng.uniform(0.5, 2))
            (await client.post(f"{url}/_emulator/faults", json=end)).raise_for_status()
        await self._ready(url)
        self._ledger.end(fault)

    async def _start(self, number: int) -> None:
        port = self.replicas[number].port
        log = self._folder / f"replica-{number}.log"
        self.replicas[number] = await asyncio.to_thread(Emulated, port, log)
        await self._ready(self.replicas[number].url)

    async def _ready(self, url: str) -> None:
        """Wait until the router places requests there again."""
        deadline = self._ledger.now() + BACK_S
        async with httpx.AsyncClient(trust_env=False) as client:
            while True:
                with suppress(httpx.TransportError, KeyError):
                    answer = (await client.get(f"{self.router.admin_url}/replicas")).json()
                    if any(each["url"] == url and each["state"] == "ready" for each in answer["replicas"]):
                        return
                if self._ledger.now() > deadline:
                    self._ledger.violate(f"{url} is well, and not ready again within {BACK_S} s: {answer}")
                    return
                await asyncio.sleep(0.2)

    # What may happen to the router

    async def _reload(self, _: int) -> None:
        """Another configuration."""
        self._ledger.counts["reloads"] += 1
        self.write()
        self.router.signal(signal.SIGHUP)

    async def _switch(self, _: int) -> None:
        """Another policy, by the admin port."""
        given = self._rng.choice(POLICIES)
        wanted = {"name": given["name"], "parameters": {}}
        async with httpx.AsyncClient(trust_env=False) as client:
            answer = await client.put(f"{self.router.admin_url}/policy", json=wanted)
        if answer.status_code != 200:
            self._ledger.violate(f"the policy was not switched: {answer.text}")
        self._ledger.counts["switches"] += 1

    async def _order(self, number: int) -> None:
        """A drain that an operator orders, and takes back."""
        url = self.replicas[number].url
        async with httpx.AsyncClient(trust_env=False) as client:
            path = f"{self.router.admin_url}/replicas/{url.replace('/', '%2F')}/drain"
            answer = await client.post(path, json={"homes": self._rng.choice(("finish", "move"))})
            if answer.status_code == 404:
                self._ledger.counts["orders unknown"] += 1
                return
            if answer.is_error:
                self._ledger.violate(f"draining was refused: {answer.status_code} {answer.text}")
                return
            await asyncio.sleep(self._rng.uniform(0.5, 3))
            answer = await client.delete(path)
            if answer.is_error:
                self._ledger.violate(f"undraining was refused: {answer.status_code} {answer.text}")
        await self._ready(url)
        self._ledger.counts["orders"] += 1
