"""An emulated replica as a running server."""

from __future__ import annotations

import asyncio
import socket
from typing import Self

import uvicorn

from sim.emulator.answer import Record
from sim.emulator.app import make_app
from sim.emulator.config import EmulatorConfig
from sim.emulator.engine import Engine

_WATCHDOG_SECONDS = 5.0
"""A draining engine looks this often whether it is idle."""
_CLOSE_SECONDS = 1
"""Limit for connections to end when everything on them has been aborted."""
_LOGGING = {"version": 1, "disable_existing_loggers": False, "loggers": {"uvicorn": {"level": "CRITICAL"}}}
"""A cut stream is an exception in the app; the default would log each with its traceback."""


class Emulator:
    """One replica, as an async context manager:

    async with Emulator(EmulatorConfig(time_scale=0.001)) as replica:
        ...replica.url...
    """

    def __init__(self, config: EmulatorConfig | None = None) -> None:
        self.config = config or EmulatorConfig()
        self._engine: Engine | None = None
        self._server: uvicorn.Server | None = None
        self._port = self.config.port
        self._sockets: list[socket.socket] = []
        self._serving: asyncio.Task[None] | None = None
        self._draining: asyncio.Task[None] | None = None
        self._closed = asyncio.Event()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listens when it returns; OSError when the port is taken."""
        listener = _listen(self.config.host, self.config.port)
        self._sockets, self._port = [listener], int(listener.getsockname()[1])
        self._engine = Engine(self.config)
        app = make_app(self._engine)
        app.state.port = self.port
        settings = uvicorn.Config(
            app,
            lifespan="off",
            log_config=_LOGGING,
            access_log=False,
            timeout_keep_alive=self.config.keep_alive_seconds,  # type: ignore[arg-type]  # handed to call_later
            timeout_graceful_shutdown=_CLOSE_SECONDS,
        )
        settings.load()
        self._server = uvicorn.Server(settings)
        self._server.lifespan = settings.lifespan_class(settings)
        await self._server.startup(sockets=self._sockets)
        self._serving = asyncio.create_task(self._server.main_loop())

    async def stop(self) -> None:
        """Aborts what runs and closes all connections. Nothing when it is not running."""
        if self._draining is not None and self._draining is not asyncio.current_task():
            self._draining.cancel()
        server, self._server = self._server, None
        if server is None:
            return
        self.engine.close()
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.wait((self._serving,))
        await server.shutdown(sockets=self._sockets)
        self._closed.set()

    async def kill(self) -> None:
        """Dies as a crashed process does: all connections are reset at once, and nothing listens any more."""
        if self._server is not None:
            for connection in tuple(self._server.server_state.connections):
                connection.transport.abort()
        await self.stop()

    def drain(self) -> None:
        """What SIGTERM does: /ready and /health fail, requests are served until none is left, then the server stops."""
        if self._draining is None:
            self.engine.draining = True
            self._draining = asyncio.create_task(self._drain())

    async def closed(self) -> None:
        """Returns when the server has stopped, after a drain for example."""
        await self._closed.wait()

    @property
    def url(self) -> str:
        """Base URL without a slash at its end."""
        host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
        return f"http://{host}:{self.port}"

    @property
    def port(self) -> int:
        """The port it listens on."""
        return self._port

    @property
    def engine(self) -> Engine:
        """The engine; RuntimeError before the start."""
        if self._engine is None:
            raise RuntimeError("the emulator has not been started")
        return self._engine

    def fault(self, **changes: object) -> None:
        """Switches faults (see `Faults`), as POST /_emulator/faults; ValueError names what cannot be."""
        self.engine.set_faults(changes)

    @property
    def log(self) -> list[Record]:
        """The last 1,000 inference requests, oldest first."""
        return list(self.engine.log)

    @property
    def requests(self) -> int:
        """Inference requests received since the start, refused ones too."""
        return self.engine.requests

    @property
    def running(self) -> int:
        """Requests in the running batch."""
        return sum(len(rank.replica.running) for rank in self.engine.schedulers)

    @property
    def queued(self) -> int:
        """Requests that wait."""
        return sum(len(rank.replica.waiting) for rank in self.engine.schedulers)

    @property
    def finished(self) -> int:
        """Requests that ended by themselves, since the start."""
        return sum(rank.replica.totals.finished for rank in self.engine.schedulers)

    @property
    def aborted(self) -> int:
        """Requests that were ended early, since the start."""
        return sum(rank.replica.totals.aborted for rank in self.engine.schedulers)

    @property
    def rejected(self) -> int:
        """Requests refused for a full queue, since the start."""
        return sum(rank.replica.totals.rejected for rank in self.engine.schedulers)

    async def _drain(self) -> None:
        while True:
            await asyncio.sleep(_WATCHDOG_SECONDS * self.config.time_scale)
            if self.engine.live == 0:
                break
        await self.stop()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Named protocol: asyncio turns Nagle's algorithm off only for sockets that say they are TCP.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError:
        listener.close()
        raise
    return listener
