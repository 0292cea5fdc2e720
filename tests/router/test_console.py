"""`warmroute replicas` against a running router, and against none."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

from sim.emulator import Emulator, EmulatorConfig
from tests.fakes.process import free_port, start_router


def _replicas(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "router.cli", "replicas", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)


async def test_it_shows_the_replicas_of_a_running_router(tmp_path: Path) -> None:
    async with Emulator(EmulatorConfig()) as replica:
        router = await asyncio.to_thread(start_router, [replica.url], tmp_path / "log")
        try:
            table = await asyncio.to_thread(_replicas, "--admin", router.admin_url)
            listed = await asyncio.to_thread(_replicas, "--admin", router.admin_url, "--json")
        finally:
            await asyncio.to_thread(router.stop)
    assert (table.returncode, listed.returncode) == (0, 0), table.stderr + listed.stderr
    assert table.stdout.splitlines()[1].split()[:3] == [replica.url, "ready", "0"]
    assert [found["url"] for found in json.loads(listed.stdout)] == [replica.url]


def test_without_a_router_it_says_so_and_fails() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    found = _replicas("--admin", url)
    assert found.returncode == 1
    assert url in found.stderr
    assert "--admin" in found.stderr
    assert "Traceback" not in found.stderr
