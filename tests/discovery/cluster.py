"""Pods of emulated replicas, an API server that tells of them, and a router process that knows nothing else."""

from __future__ import annotations

import asyncio
import signal
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Self

import yaml

from tests.fakes.kubernetes import KubernetesApi, endpoint_slice, pod
from tests.fakes.process import Process, Router
from tests.fakes.waiting import until
from tests.fakes.wire import LIMIT_S
from tests.sharing.several import asked

TIME_SCALE = 0.02


class Cluster:
    """Each pod stands in a slice of its own, as they differ by their port here and not by their address."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.api = KubernetesApi()
        self.namespace = "default"
        self.ca_file = ""
        """Authorities that the router trusts for the API server."""
        self.router: Router
        self.source = ""
        """What the router calls it."""
        self.pods: dict[str, Process] = {}
        self.ports: dict[str, int] = {}
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        await self.api.start()
        self._stack.push_async_callback(self.api.stop)
        (self.folder / "token").write_text("token-1")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def run(self, *names: str) -> None:
        """Start pods, of which nobody is told yet, and wait until they serve."""
        for name in names:
            command = [sys.executable, "-m", "sim.emulator", "--time-scale", str(TIME_SCALE), "--page-size", "16"]
            process = Process([*command, "--keep-alive-seconds", "60"], self.folder / f"{name}.log")
            self._stack.callback(process.stop)
            self.pods[name] = process
        for name in names:
            line = await asyncio.to_thread(self.pods[name].wait_line, lambda line: line.startswith("ready"), LIMIT_S)
            self.ports[name] = int(line.split()[1])

    async def end(self, name: str) -> None:
        """As the kubelet does: the pod finishes what it has, and is gone."""
        self.pods[name].signal(signal.SIGTERM)
        await asyncio.to_thread(self.pods[name].wait_end, LIMIT_S)

    def tell(self, name: str, *, at: str | None = None, uid: str | None = None, **conditions: bool) -> None:
        """What the controllers write of it; `at` another one's port."""
        endpoint = pod(name, "127.0.0.1", uid, **conditions)
        port = self.ports[at or name]
        self.api.put(endpoint_slice(f"sglang-{name}", [endpoint], port=port, namespace=self.namespace))

    def withdraw(self, name: str) -> None:
        self.api.delete(f"sglang-{name}")

    def write(self, name: str, tree: Any) -> str:
        """A file; its path."""
        file = self.folder / name
        file.write_text(yaml.safe_dump(tree))
        return str(file)

    async def serve(self, *flags: str, wait_for: str = "/readyz", **settings: Any) -> None:
        """The router, by default until it is ready."""
        given = {"namespace": self.namespace, "service": "sglang", "port": "http"}
        given |= {"url": self.api.url, "token_file": str(self.folder / "token"), "ca_file": self.ca_file}
        self.source = f"kubernetes:{self.api.url}/{self.namespace}/sglang:http"
        tree = {
            "discovery": {"kubernetes": [given]},
            # What is known decides here: how long others wait there, on a machine busy with other things, does not.
            "policy": {"name": "session_affinity", "parameters": {"hysteresis_s": 600}},
            "response_headers": True,
        }
        file = self.write("c.yaml", tree | settings)
        self.router = Router([], self.folder / "router.log", "--config", file, *flags)
        self._stack.push_async_callback(asyncio.to_thread, self.router.stop)
        await asyncio.to_thread(self.router.wait_ok, self.router.admin_url + wait_for, LIMIT_S)

    async def fleet(self) -> dict[str, dict[str, Any]]:
        """What `/replicas` tells of each, by id."""
        return {each["id"]: each for each in (await asked(self.router, "GET", "/replicas"))["replicas"]}

    async def states(self, **states: str) -> dict[str, dict[str, Any]]:
        """Wait until the fleet is these, in these states; `_` in names stands for `-`."""
        wanted = {name.replace("_", "-"): state for name, state in states.items()}
        return await until(
            self.fleet,
            lambda fleet: {name: each["state"] for name, each in fleet.items()} == wanted,
            LIMIT_S,
            f"the fleet is {wanted}",
        )

    async def seen(self) -> dict[str, Any]:
        """What `/overview` tells of the source."""
        (source,) = (await asked(self.router, "GET", "/overview"))["discovery"]
        return dict(source)
