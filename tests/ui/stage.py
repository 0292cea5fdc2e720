"""What the page's tests and pictures share: a router before emulated replicas under load, and a browser that looks."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import httpx
import yaml
from playwright.async_api import Browser, Page, async_playwright

from sim.emulator import Emulator, EmulatorConfig
from tests.fakes.process import Router

CHROMIUM = "/usr/bin/chromium"
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
LIMIT_S = 60


async def emulated(stack: AsyncExitStack, count: int, time_scale: float = 0.05, kv_tokens: int = 400_000) -> list[str]:
    """URLs of emulated replicas that run until the stack is left."""
    config = EmulatorConfig(time_scale=time_scale, kv_tokens=kv_tokens, default_include_usage=True)
    return [(await stack.enter_async_context(Emulator(config))).url for _ in range(count)]


@asynccontextmanager
async def routing(replicas: Mapping[str, str], folder: Path, **settings: object) -> AsyncIterator[Router]:
    """A router before replicas by id, with these settings besides; it may be that none is ready."""
    config = folder / "warmroute.yaml"
    fleet = [{"id": name, "url": url} for name, url in replicas.items()]
    config.write_text(yaml.safe_dump({"replicas": fleet, "health": {"interval_s": 0.2}, **settings}))
    router = Router([], folder / "router.log", "--config", str(config))
    try:
        await asyncio.to_thread(router.wait_ok, f"{router.admin_url}/livez", LIMIT_S)
        yield router
    finally:
        await asyncio.to_thread(router.stop)


class Load:
    """Sessions that talk, each turn on top of the last, until stopped."""

    def __init__(self, url: str, sessions: int, *, prompt_bytes: int = 40_000, pause_s: float = 0.3) -> None:
        self._url = url
        self._prompt_bytes = prompt_bytes
        self._pause_s = pause_s
        self.turns = 0
        self._tasks = [asyncio.create_task(self._talk(number)) for number in range(sessions)]

    async def _talk(self, number: int) -> None:
        chance = random.Random(number)
        text = f"{number} " * (int(self._prompt_bytes * chance.uniform(0.2, 2)) // 3)
        headers = {"x-session-affinity": f"session {number}"}
        async with httpx.AsyncClient(base_url=self._url, trust_env=False, timeout=60) as client:
            for turn in itertools.count():
                await asyncio.sleep(self._pause_s * chance.random())
                text += f"turn {turn} " * chance.randrange(200)
                body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": text}]}
                with suppress(httpx.HTTPError):  # a replica that dies in the middle of an answer is part of the play
                    await client.post("/v1/chat/completions", json=body, headers=headers)
                    self.turns += 1

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@asynccontextmanager
async def loaded(url: str, sessions: int, **given: float) -> AsyncIterator[Load]:
    """Load for as long as the context lasts."""
    load = Load(url, sessions, **given)  # type: ignore[arg-type]
    try:
        yield load
    finally:
        await load.stop()


@asynccontextmanager
async def browsing() -> AsyncIterator[Browser]:
    """Debian's Chromium without a window."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        try:
            yield browser
        finally:
            await browser.close()


class Watched:
    """What a page did that it must not: errors on its console, and requests to anybody but its router."""

    def __init__(self, page: Page, origin: str) -> None:
        self.errors: list[str] = []
        self.outside: list[str] = []
        page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on(
            "request",
            lambda request: None if request.url.startswith(f"{origin}/ui") else self.outside.append(request.url),
        )


async def state_of(router: Router, replica: str) -> str:
    """As its admin port says."""
    async with httpx.AsyncClient(base_url=router.admin_url, trust_env=False) as client:
        found: Sequence[dict[str, str]] = (await client.get("/replicas")).json()["replicas"]
    return next(each["state"] for each in found if each["id"] == replica)
