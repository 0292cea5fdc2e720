"""A router under load before emulated replicas, with a store of its own, and a real Prometheus that scrapes them all
every second.

What happens while it is watched: sessions of growing prompts, some with forks; clients that leave; requests that are
refused; one replica that comes up late, as at a scale-out; another that is killed and comes back.
"""

from __future__ import annotations

import asyncio
import random
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.fakes.process import Process, Router, free_port, start_router
from tests.fakes.waiting import until
from tests.store.servers import NEEDED, Server, binaries

SCRAPE_S = 1
SESSIONS = 24
TIME_SCALE = 0.5
KV_TOKENS = 300_000
"""Small enough for sessions to push each other out in the end."""
JSON = {"content-type": "application/json"}


@dataclass
class Watched:
    """What is to be asked, and when it ran, seconds since the epoch."""

    prometheus: str
    router: Router
    began: float
    ended: float

    def query(self, expr: str) -> list[dict[str, Any]]:
        """Series with a value at the end."""
        return self._ask("query", query=expr, time=str(self.ended))

    def query_range(self, expr: str, step_s: float = SCRAPE_S) -> list[dict[str, Any]]:
        """Series over all of the time."""
        return self._ask("query_range", query=expr, start=str(self.began), end=str(self.ended), step=str(step_s))

    def _ask(self, what: str, **given: str) -> list[dict[str, Any]]:
        answer = httpx.post(f"{self.prometheus}/api/v1/{what}", data=given, trust_env=False, timeout=60).json()
        assert answer["status"] == "success", f"{answer.get('error')}: {given['query']}"
        return list(answer["data"]["result"])


class Fleet:
    """Emulated replicas by URL, each a process of its own."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self.urls = [f"http://127.0.0.1:{free_port()}" for _ in range(4)]
        self._stack = stack
        self._folder = folder
        self._processes: dict[str, Process] = {}

    def start(self, url: str) -> None:
        """One of them; it listens when this returns."""
        port = url.rpartition(":")[2]
        command: list[str | Path] = [sys.executable, "-m", "sim.emulator", "--port", port, "--default-include-usage"]
        command += ["--time-scale", str(TIME_SCALE), "--kv-tokens", str(KV_TOKENS), "--page-size", "1"]
        self._processes[url] = process = Process(command, self._folder / f"replica-{port}-{time.time():.0f}.log")
        self._stack.enter_context(process)
        process.wait_line(lambda line: line.startswith("ready"), 60)

    def kill(self, url: str) -> None:
        """At once, as if its memory had run out."""
        self._processes[url].signal(signal.SIGKILL)


@contextmanager
def watched(folder: Path, seconds: float) -> Iterator[Watched]:
    """Run it all for so long; Prometheus stays until the end."""
    with ExitStack() as stack:
        fleet = Fleet(stack, folder)
        for url in fleet.urls[:3]:
            fleet.start(url)
        found = list(binaries().values())
        assert found, NEEDED
        store = Server(found[0])
        stack.callback(store.remove)
        store.start()
        known = folder / "replicas.yaml"
        known.write_text(yaml.safe_dump(fleet.urls))
        config = folder / "warmroute.yaml"
        config.write_text(
            yaml.safe_dump(
                {
                    "discovery": {"file": str(known)},
                    "pools": [{"name": "all"}, {"name": "unused", "models": ["nobody's"]}],
                    "policy": {"name": "session_affinity", "shadow": "dual_choice"},
                    "journal": {"path": str(folder / "journal.jsonl")},
                    "health": {"fail_after": 6, "passive_fail_after": 40},  # some requests find out first
                    "pool": {"idle_s": 1},
                    "store": {"url": store.url},
                    "identity": {"secret": "the same at all routers"},
                }
            )
        )
        router = start_router([], folder / "router.log", "--config", str(config))
        stack.callback(router.stop)
        prometheus = _prometheus(stack, folder, [router.admin_url], fleet.urls)
        began = time.time()
        asyncio.run(_load(router, seconds, lambda client: _events(fleet, router, client, seconds)))
        yield Watched(prometheus, router, began, asyncio.run(_seen_since(prometheus, time.time())))


async def _seen_since(prometheus: str, when: float) -> float:
    """Wait until every target has been scraped since then. A time at which it had been."""

    async def scraped() -> float:
        """When the one was that was scraped least lately, seconds since the epoch; 0 while there is none."""
        async with httpx.AsyncClient(trust_env=False) as client:
            answer = (await client.get(f"{prometheus}/api/v1/query", params={"query": "min(timestamp(up))"})).json()
        return float(answer["data"]["result"][0]["value"][1]) if answer["data"]["result"] else 0.0

    return await until(scraped, lambda seen: seen > when, 60, "the end is scraped")


def _prometheus(stack: ExitStack, folder: Path, routers: list[str], engines: list[str]) -> str:
    def job(name: str, urls: list[str]) -> dict[str, Any]:
        targets = [url.removeprefix("http://") for url in urls]
        return {"job_name": name, "static_configs": [{"targets": targets}]}

    every = f"{SCRAPE_S}s"
    config = folder / "prometheus.yaml"
    config.write_text(
        yaml.safe_dump(
            {
                "global": {"scrape_interval": every, "scrape_timeout": every, "evaluation_interval": every},
                "scrape_configs": [job("warmroute", routers), job("sglang", engines)],
            }
        )
    )
    listen = f"127.0.0.1:{free_port()}"
    command: list[str | Path] = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder / 'tsdb'}"]
    process = stack.enter_context(Process([*command, f"--web.listen-address={listen}"], folder / "prometheus.log"))
    process.wait_ok(f"http://{listen}/-/ready", 60)
    return f"http://{listen}"


async def _events(fleet: Fleet, router: Router, client: httpx.AsyncClient, seconds: float) -> None:
    """What happens to the fleet."""
    await asyncio.sleep(seconds / 3)
    await asyncio.to_thread(fleet.start, fleet.urls[3])
    await asyncio.sleep(seconds / 6)
    rush = [asyncio.create_task(_turn(client, f"rush-{number}", ["all at once"], 400)) for number in range(24)]
    await asyncio.sleep(0.5)
    replicas = (await client.get(f"{router.admin_url}/replicas")).json()["replicas"]
    busiest = max(replicas, key=lambda each: int(each["in_flight"]))["id"]
    fleet.kill(busiest)  # in the middle of many streams
    await asyncio.sleep(seconds / 8)
    await asyncio.to_thread(fleet.start, busiest)
    await asyncio.gather(*rush)

    async def serving() -> list[bool]:
        told = (await client.get(f"{router.admin_url}/replicas")).json()["replicas"]
        return [each["state"] == "ready" and each["resident_tokens"] > 0 for each in told]

    await until(serving, all, 60, "all serve, the late one and the one that was killed too")


async def _load(router: Router, seconds: float, events: Callable[[httpx.AsyncClient], Awaitable[None]]) -> None:
    """For so long, and until all has happened, however slow the machine is."""
    over = asyncio.Event()
    limits = httpx.Limits(max_connections=500)
    async with httpx.AsyncClient(
        base_url=router.url, trust_env=False, headers=JSON, timeout=10, limits=limits
    ) as client:

        async def happen() -> None:
            await asyncio.gather(asyncio.sleep(seconds), events(client))
            over.set()

        sessions = [_session(client, f"session-{number}", random.Random(number), over) for number in range(SESSIONS)]
        await asyncio.gather(*sessions, _strays(client, over), happen())


async def _session(client: httpx.AsyncClient, name: str, chance: random.Random, over: asyncio.Event) -> None:
    """One agent after another, each with prompts that grow; now and then with forks, or a client that leaves."""
    number = 0
    while not over.is_set():
        key, words = f"{name}-{number}", [f"{name} {number} begins. " + "word " * chance.randint(1000, 4000)]
        number += 1
        for _ in range(chance.randint(5, 30)):
            if over.is_set():
                return
            words.append("more " * chance.randint(100, 800))
            turns = [_turn(client, key, words, chance.randint(10, 60))]
            if chance.random() < 0.06:  # so much at once that not all of it is worth waiting for at home
                turns += [_turn(client, key, [*words, f"fork {fork} " * 3000], 40) for fork in range(6)]
            if chance.random() < 0.05:
                with suppress(TimeoutError):
                    async with asyncio.timeout(0.05):
                        await _turn(client, key, words, 500)
            await asyncio.gather(*turns)
            await asyncio.sleep(chance.uniform(0.1, 1.0))


async def _turn(client: httpx.AsyncClient, key: str, words: list[str], tokens: int) -> None:
    messages = [{"role": "user" if i % 2 == 0 else "assistant", "content": text} for i, text in enumerate(words)]
    body = {"model": "emulated", "stream": True, "max_tokens": tokens, "ignore_eos": True, "messages": messages}
    with suppress(httpx.HTTPError):  # a killed replica breaks answers off
        await client.post("/v1/chat/completions", json=body, headers={"x-session-affinity": key})


async def _strays(client: httpx.AsyncClient, over: asyncio.Event) -> None:
    """Requests of no session, and refused ones."""
    while not over.is_set():
        with suppress(httpx.HTTPError):
            await client.get("/v1/models")
            await client.post("/flush_cache")
        await asyncio.sleep(0.5)
