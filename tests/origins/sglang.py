"""SGLang's router as its users run it: the package's process, before stand-ins that answer when the test says so."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

from tests.fakes.process import Process, free_port
from tests.fakes.upstream import Peer, RawRequest, Script, ScriptedUpstream, ok
from tests.fakes.waiting import until

LIMIT_S = 60.0
"""The longest that anything is waited for."""

ABOUT = b'{"model_path":"m","served_model_name":"m"}'
ANSWER = (
    b'{"id":"x","object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant","content":"ok"},'
    b'"finish_reason":"stop"}],"usage":{"prompt_tokens":1,"completion_tokens":1,"total_tokens":2}}'
)
JSON = "Content-Type: application/json"


class SglangRouter:
    """`sglang-router` with policy `cache_aware` before `count` stand-ins, known by number."""

    def __init__(self, folder: Path, count: int, *flags: str) -> None:
        self._folder, self._flags = folder, flags
        self._stand_ins = [ScriptedUpstream(self._script(n)) for n in range(count)]
        self._arrivals: asyncio.Queue[tuple[int, RawRequest, asyncio.Event]] = asyncio.Queue()
        self._open: dict[int, tuple[int, asyncio.Event, asyncio.Task[httpx.Response]]] = {}
        self._sent = 0

    async def __aenter__(self) -> Self:
        program = Path(sys.executable).parent / "sglang-router"
        assert program.exists(), f"{program} is missing: `make setup` installs it with the other development packages"
        for stand_in in self._stand_ins:
            await stand_in.start()
        port, metrics = free_port(), free_port()
        command: list[str | Path] = [
            program,
            "launch",
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            "--policy",
            "cache_aware",
        ]
        command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics), "--log-level", "warn"]
        command += ["--worker-urls", *(stand_in.url for stand_in in self._stand_ins), *self._flags]
        self._process = Process(command, self._folder / "sglang-router.log")
        url = f"http://127.0.0.1:{port}"
        self._client = httpx.AsyncClient(base_url=url, trust_env=False, timeout=LIMIT_S)
        try:
            await asyncio.to_thread(self._process.wait_ok, f"{url}/readiness", LIMIT_S)
            await until(self.loads, lambda loads: len(loads) == len(self._stand_ins), LIMIT_S, "all replicas are known")
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop()

    async def send(self, body: bytes) -> tuple[int, int]:
        """Send a chat request, which stays in flight. Gives its number and the number of the stand-in that got it."""
        headers = {"content-type": "application/json"}
        asked = asyncio.ensure_future(self._client.post("/v1/chat/completions", content=body, headers=headers))
        arrived = asyncio.ensure_future(self._arrivals.get())
        await asyncio.wait([asked, arrived], timeout=LIMIT_S, return_when=asyncio.FIRST_COMPLETED)
        assert arrived.done(), f"no stand-in got it: {asked.result().text if asked.done() else self._process.tail()}"
        stand_in, request, end = arrived.result()
        assert body[-200:-20] in request.body, "the request that came is the one that was sent"
        self._sent += 1
        self._open[self._sent] = (stand_in, end, asked)
        return self._sent, stand_in

    async def finish(self, number: int) -> None:
        """Let a request be answered, and wait until the router has taken it off its counts."""
        _, end, asked = self._open.pop(number)
        end.set()
        assert (await asked).status_code == 200
        expected = [0] * len(self._stand_ins)
        for stand_in, _, _ in self._open.values():
            expected[stand_in] += 1
        await until(self.loads, lambda loads: loads == expected, LIMIT_S, f"the router counts {expected} in flight")

    async def loads(self) -> list[int]:
        """Requests in flight by the router's own count, in the order of the stand-ins."""
        workers = (await self._client.get("/workers")).json()["workers"]
        by_url = {worker["url"]: int(worker["load"]) for worker in workers}
        return [by_url[stand_in.url] for stand_in in self._stand_ins if stand_in.url in by_url]

    async def _stop(self) -> None:
        for _, end, _ in self._open.values():
            end.set()
        await asyncio.gather(*(asked for _, _, asked in self._open.values()), return_exceptions=True)
        await self._client.aclose()
        await asyncio.to_thread(self._process.stop)
        for stand_in in self._stand_ins:
            await stand_in.stop()

    def _script(self, number: int) -> Script:
        async def script(peer: Peer) -> None:
            while True:
                request = await peer.request()
                if request.method == "PRI":
                    return  # it tries whether this is HTTP/2; SGLang's is not
                if request.method == "POST":
                    end = asyncio.Event()
                    self._arrivals.put_nowait((number, request, end))
                    await end.wait()
                    peer.send(ok(ANSWER, JSON))
                else:
                    peer.send(ok(ABOUT, JSON))

        return script
