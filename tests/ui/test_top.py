"""`warmroute top` as a program: in a pseudo-terminal, in a pipe, and as its router goes and comes back."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import termios
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from tests.fakes.process import ROOT, Router, free_port
from tests.fakes.replica import FakeReplica
from tests.fakes.waiting import until
from tests.ui.stage import LIMIT_S, emulated, loaded, routing, state_of

WARMROUTE = ROOT / ".venv/bin/warmroute"
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """A pseudo-terminal in which `warmroute top` runs; what it ever showed, without escape codes, is in `shown`."""

    def __init__(self, *arguments: str, columns: int, lines: int) -> None:
        self.fd, inner = pty.openpty()
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.before = termios.tcgetattr(inner)
        environment = {
            name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")
        }
        self.process = subprocess.Popen(
            [WARMROUTE, "top", *arguments],
            stdin=inner,
            stdout=inner,
            stderr=inner,
            env=environment | {"TERM": "xterm-256color"},
            start_new_session=True,
        )
        self._inner = inner
        self.raw = b""
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        try:
            while data := os.read(self.fd, 65_536):
                self.raw += data
        except OSError:  # closed
            return

    @property
    def shown(self) -> str:
        return ESCAPES.sub("", self.raw.decode(errors="replace"))

    @property
    def screen(self) -> str:
        """What it showed last, drawn to its end: between the cursor's last two ways home."""
        *_, drawn, _ = ["", *self.raw.decode(errors="replace").split("\x1b[H")]
        return ESCAPES.sub("", drawn).replace("\r", "")

    def press(self, key: str) -> None:
        os.write(self.fd, key.encode())

    async def shows(self, text: str) -> None:
        """Wait until it has shown a text at any time."""

        async def look() -> str:
            return self.shown

        await until(look, lambda seen: text in seen, LIMIT_S, f"it shows {text!r}")

    async def draws(self, holds: Callable[[str], object], what: str) -> str:
        """Wait for a whole screen of which something holds; returns it."""

        async def look() -> str:
            return self.screen

        return await until(look, lambda screen: bool(holds(screen)), LIMIT_S, what)

    async def ends(self) -> int:
        return await asyncio.to_thread(self.process.wait, LIMIT_S)

    def left_as_found(self) -> bool:
        """The settings of the terminal, the cursor and the ordinary screen are back."""
        shown = self.raw.rindex(b"\x1b[?25h") > self.raw.rindex(b"\x1b[?25l")
        ordinary = self.raw.rindex(b"\x1b[?1049l") > self.raw.rindex(b"\x1b[?1049h")
        return termios.tcgetattr(self._inner) == self.before and shown and ordinary

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._inner)
        os.close(self.fd)


@contextmanager
def terminal(*arguments: str, columns: int = 120, lines: int = 40) -> Iterator[Terminal]:
    opened = Terminal(*arguments, columns=columns, lines=lines)
    try:
        yield opened
    finally:
        opened.close()


def top(*arguments: str) -> subprocess.CompletedProcess[str]:
    """In a pipe."""
    return subprocess.run([WARMROUTE, "top", *arguments], capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
async def router(tmp_path: Path) -> AsyncIterator[Router]:
    """Before three replicas under load and a port where none is."""
    async with AsyncExitStack() as stack:
        fleet = dict(zip(("r1", "r2", "r3"), await emulated(stack, 3), strict=True))
        fleet["dead"] = f"http://127.0.0.1:{free_port()}"
        router = await stack.enter_async_context(routing(fleet, tmp_path))
        await until(lambda: state_of(router, "dead"), lambda state: state == "ejected", LIMIT_S, "it is ejected")
        await stack.enter_async_context(loaded(router.url, 4))
        yield router


async def test_it_draws_hears_keys_and_leaves_the_terminal_as_it_was(router: Router) -> None:
    with terminal("--admin", router.admin_url) as shown:
        for text in ("1 ejected of 4 replicas", "requests/s", "IN FLIGHT", "r3", "DECISIONS", "stays on", "q quits"):
            await shown.shows(text)
        assert "refused" in shown.shown, "why the dead one is out"
        await shown.draws(lambda screen: re.search(r"REPLICA.*\n.*dead", screen), "the one in trouble first")
        shown.press("n")
        await shown.draws(lambda screen: "dead" in screen, "sorted by name")
        shown.press("q")
        assert await shown.ends() == 0
        assert shown.left_as_found()


async def test_a_signal_leaves_the_terminal_as_it_was(router: Router) -> None:
    with terminal("--admin", router.admin_url) as shown:
        await shown.shows("q quits")
        shown.process.send_signal(signal.SIGTERM)
        assert await shown.ends() == 0
        assert shown.left_as_found()


async def test_a_narrow_terminal_gets_fewer_columns_and_no_broken_lines(router: Router) -> None:
    with terminal("--admin", router.admin_url, columns=48, lines=20) as shown:
        await shown.shows("q quits")
        await shown.shows("stays on")
        screen = (await shown.draws(lambda screen: "stays on" in screen, "all of it")).split("\n")
        assert max(map(len, screen)) <= 48
        assert len(screen) <= 20
        assert "HIT RATE" not in shown.shown
        assert "WAIT" in shown.shown


async def test_it_outlives_its_router(router: Router, tmp_path: Path) -> None:
    with terminal("--admin", router.admin_url) as shown:
        await shown.shows("DECISIONS")
        await asyncio.to_thread(router.stop)
        await shown.draws(
            lambda screen: "unreachable since" in screen and "r3" in screen, "what was seen last is still there"
        )
        ports = ["--port", str(router.port), "--admin-port", router.admin_url.rpartition(":")[2]]
        again = Router([], tmp_path / "again.log", "--config", str(tmp_path / "warmroute.yaml"), *ports)
        try:
            await shown.draws(lambda screen: "r3" in screen and "unreachable" not in screen, "it is back")
        finally:
            await asyncio.to_thread(again.stop)


async def test_in_a_pipe_it_prints_once_without_escape_codes(router: Router) -> None:
    for arguments in ([], ["--once"]):
        done = await asyncio.to_thread(top, "--admin", router.admin_url, *arguments)
        assert (done.returncode, done.stderr) == (0, "")
        assert "\x1b" not in done.stdout
        assert "1 ejected of 4 replicas" in done.stdout
        assert "Connection refused" in done.stdout


async def test_as_json_it_is_what_the_admin_port_tells(router: Router) -> None:
    done = await asyncio.to_thread(top, "--admin", router.admin_url, "--json")
    told = json.loads(done.stdout)
    async with httpx.AsyncClient(base_url=router.admin_url, trust_env=False) as client:
        assert told.keys() == (await client.get("/overview")).json().keys()
    assert [each["id"] for each in told["replicas"]] == ["dead", "r1", "r2", "r3"]


def test_once_without_a_router_it_says_so_and_fails() -> None:
    done = top("--once", "--admin", f"http://127.0.0.1:{free_port()}")
    assert done.returncode == 1
    assert "is warmroute running" in done.stderr


async def test_a_fleet_that_is_used_although_it_is_not_well_says_so(tmp_path: Path) -> None:
    """The panic rule makes them `ready`; whoever watches must not be told that they are."""
    async with AsyncExitStack() as stack:
        fleet = {}
        for name in ("r1", "r2"):
            fake = FakeReplica(ready=500)
            await fake.start()
            stack.push_async_callback(fake.stop)
            fleet[name] = fake.url
        router = await stack.enter_async_context(routing(fleet, tmp_path))
        headline = "None of 2 replicas is well; the panic rule uses 2 that are not"

        async def verdict() -> str:
            async with httpx.AsyncClient(base_url=router.admin_url, trust_env=False) as client:
                return str((await client.get("/overview")).json()["verdict"]["text"])

        await until(verdict, lambda text: text == headline, LIMIT_S, "the panic rule holds")
        done = await asyncio.to_thread(top, "--once", "--admin", router.admin_url)
        rows = [line for line in done.stdout.splitlines() if line.startswith(("r1 ", "r2 "))]
        assert len(rows) == 2
        for row in rows:
            assert "ejected, used all the same" in row
            assert "panic: used although ejected: /ready says 500" in row
        async with httpx.AsyncClient(base_url=router.admin_url, trust_env=False) as client:
            page = (await client.get("/ui")).text
        assert f"<title>{headline} - warmroute</title>" in page
        assert page.count("✕</span> ejected, used all the same") == 2
        assert page.count("panic: used although ejected: /ready says 500") == 2
