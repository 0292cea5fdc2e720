"""A router process with a configuration file, before replicas whose streams the test lets end: for operating it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.fakes.client import Answer, RawClient, post
from tests.fakes.gated import Gated
from tests.fakes.process import ROOT, Router
from tests.fakes.waiting import until
from tests.fakes.wire import eventually

LIMIT_S = 60


class Operated:
    """Replicas are called a, b, c in the configuration, which `write` changes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = folder / "c.yaml"
        self.replicas: dict[str, Gated] = {}
        self.router: Router
        self.admin: httpx.AsyncClient
        self.clients: list[RawClient] = []

    async def start(self, ids: str = "ab", *flags: str, **settings: Any) -> None:
        """Replicas, the configuration, and a router that is ready."""
        for name in ids:
            await self.add(name)
        self.write(**settings)
        await self.serve(*flags)

    async def serve(self, *flags: str, wait_for: str = "/readyz") -> None:
        """The router, with the configuration that is there."""
        command = ["--config", str(self.config), *flags]
        self.router = Router([], self.folder / "router.log", *command)
        self.admin = httpx.AsyncClient(base_url=self.router.admin_url, trust_env=False, timeout=60)
        await asyncio.to_thread(self.router.wait_ok, self.router.admin_url + wait_for, LIMIT_S)

    async def add(self, name: str) -> None:
        """Another replica, not in the configuration yet."""
        self.replicas[name] = Gated()
        await self.replicas[name].upstream.start()

    def write(self, *, ids: str | None = None, **settings: Any) -> None:
        """The configuration: these replicas (all unless told), told in answers, reloaded only when told to."""
        tree: dict[str, Any] = {
            "replicas": [
                {"id": n, "url": self.replicas[n].upstream.url} for n in (self.replicas if ids is None else ids)
            ],
            "response_headers": True,
            "reload": {"watch": False},
        }
        self.config.write_text(yaml.safe_dump(tree | settings))

    async def reload(self) -> httpx.Response:
        return await self.admin.post("/reload")

    def hold(self) -> None:
        """Streams from now on do not end."""
        for replica in self.replicas.values():
            replica.finish.clear()

    def let_go(self) -> None:
        """All streams end."""
        for replica in self.replicas.values():
            replica.finish.set()

    async def chat(self, session: str) -> httpx.Headers:
        """One whole turn; the answer's headers."""
        body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "word " * 500}]}
        before = await self._in_flight()
        async with httpx.AsyncClient(base_url=self.router.url, trust_env=False, timeout=60) as client:
            answer = await client.post("/v1/chat/completions", json=body, headers={"x-session-affinity": session})
        assert answer.text.rstrip().endswith("data: [DONE]"), answer.text
        await until(self._in_flight, lambda count: count <= before, LIMIT_S, "its end is counted")
        return answer.headers

    async def _in_flight(self) -> int:
        return sum(replica["in_flight"] for replica in (await self.fleet()).values())

    async def where(self, session: str) -> str:
        """The replica that serves the session's next turn."""
        return (await self.chat(session))["x-warmroute-replica"]

    async def stream(self, session: str) -> tuple[RawClient, str]:
        """A client in the middle of a stream, and the replica that it comes from."""
        client, head = await self.begin(session)
        return client, head.header("x-warmroute-replica") or ""

    async def begin(self, session: str) -> tuple[RawClient, Answer]:
        """A stream that has begun, and its head. Connections that are still open are ended after the test."""
        client = await RawClient.connect(self.router.port)
        self.clients.append(client)
        body = json.dumps({"model": "m", "stream": True, "messages": [{"role": "user", "content": "go on"}]})
        client.send(post("/v1/chat/completions", body.encode(), f"x-session-affinity: {session}"))
        head = await client.head()
        assert head.status == 200
        assert await client.chunk() == b'data: {"id":"1"}\n\n'
        return client, head

    async def ends_whole(self, client: RawClient) -> bool:
        """Whether its stream comes to its end."""
        last = b""
        while part := await client.chunk():
            last = part
        return last == b"data: [DONE]\n\n"

    async def fleet(self) -> dict[str, Any]:
        """What `/replicas` tells of each, by id."""
        told = (await self.admin.get("/replicas")).raise_for_status().json()
        return {each["id"]: each for each in told["replicas"]}

    async def becomes(self, name: str, state: str) -> dict[str, Any]:
        async def replica() -> dict[str, Any]:
            return dict((await self.fleet()).get(name, {"state": None}))

        return await until(replica, lambda seen: seen["state"] == state, LIMIT_S, f"{name} is {state}")

    async def logged(self, text: str) -> str:
        """The log once it says this."""

        async def log() -> str:
            return self.router.log.read_text()

        return await until(log, lambda log: text in log, LIMIT_S, f"the log says {text!r}")

    async def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A command to its end."""
        command = [sys.executable, "-m", "router.cli", *arguments, "--admin", self.router.admin_url]
        return await asyncio.to_thread(
            subprocess.run, command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
        )

    async def stop(self) -> None:
        self.let_go()
        for client in self.clients:
            client.transport.abort()
        await eventually(lambda: all(client.ended for client in self.clients))
        if hasattr(self, "admin"):
            await self.admin.aclose()
            await asyncio.to_thread(self.router.stop)
        for replica in self.replicas.values():
            await replica.upstream.stop()
