"""Ports: bound with every fault explained, and served by uvicorn, which leaves signals to others."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn

from router.hosts import in_url
from router.settings import ServerTlsSettings
from router.tls import ServerTls

BACKLOG = 4096


class CannotListen(Exception):
    """A port that cannot be had. The message names host, port and remedy."""


class Server(uvicorn.Server):
    """A uvicorn server that leaves signals to the router."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()
        """Set when connections are taken."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()


def server(app: Any, tls: ServerTls | None, **given: Any) -> Server:
    """For an application, or for uvicorn's `http` protocol that is `given`."""
    config = uvicorn.Config(
        app, lifespan="off", log_config=None, access_log=False, proxy_headers=False, backlog=BACKLOG, **given
    )
    config.load()
    if tls is not None:
        config.ssl = tls.context  # made by uvicorn itself it could not be exchanged while running
    return Server(config)


def server_tls(settings: ServerTlsSettings) -> ServerTls | None:
    """What a port shows to its clients; None where it speaks plain HTTP. Raises ValueError."""
    if not settings.cert_file:
        return None
    return ServerTls(settings.cert_file, settings.key_file, settings.client_ca_file)


def bind(host: str, port: int, *, shared: bool = False) -> list[socket.socket]:
    """A bound socket for each address of the host (`localhost` may have two). Raises CannotListen.

    `shared`: other sockets that are, too, may be bound to the same port, and the kernel spreads connections over those
    that listen.
    """
    sockets: list[socket.socket] = []
    try:
        for family, kind, proto, _, address in socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP, flags=socket.AI_PASSIVE
        ):
            sock = socket.socket(family, kind, proto)
            sockets.append(sock)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if shared:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family is socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            if sockets[1:]:  # the same port, also where 0 asks for any
                address = (address[0], sockets[0].getsockname()[1], *address[2:])
            sock.bind(address)
            sock.setblocking(False)
    except (OSError, UnicodeError) as error:
        for sock in sockets:
            sock.close()
        raise CannotListen(
            f"cannot listen on {host}:{port}: {getattr(error, 'strerror', None) or error}: choose another host or port"
        ) from None
    return sockets


def url(sock: socket.socket, tls: ServerTls | None) -> str:
    """Of a bound socket, as it is told."""
    host, port = sock.getsockname()[:2]
    scheme = "http" if tls is None else "https"
    return f"{scheme}://{in_url(host)}:{port}"
