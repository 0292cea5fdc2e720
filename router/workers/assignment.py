"""What a supervisor hands over to a worker, through a socket that both have the ends of."""

from __future__ import annotations

import pickle
import socket
from dataclasses import dataclass, field
from typing import Any

from router.settings import Settings


@dataclass(frozen=True, slots=True)
class Assignment:
    """What makes a process a worker."""

    number: int
    """From 1 on."""
    count: int
    """Workers there are."""
    settings: Settings
    """In force, of all together."""
    secret: str
    """Key of the digests of sessions, where the settings have none."""
    admin: str
    """Path of the socket that its admin application is to listen on."""
    store: str
    """Path of the supervisor's store."""
    listeners: list[int]
    """Descriptors of bound sockets of the data port, one for each address."""
    file: str | None = None
    """The configuration file, to be read anew."""
    flags: dict[str, Any] = field(default_factory=dict)
    """Settings from the command line."""
    read: bytes | None = None
    """Digest of the file when it was read."""


def encoded(assignment: Assignment) -> bytes:
    """What `receive` reads. Both ends are the same program, and nobody else has the socket: pickle is safe."""
    data = pickle.dumps(assignment)
    return len(data).to_bytes(8, "big") + data


def receive(cord: socket.socket) -> Assignment:
    """Wait for it. Raises EOFError when the supervisor has gone."""
    size = int.from_bytes(_exactly(cord, 8), "big")
    assignment = pickle.loads(_exactly(cord, size))
    assert isinstance(assignment, Assignment)
    return assignment


def _exactly(cord: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = cord.recv(min(1 << 20, size - len(data)))
        if not part:
            raise EOFError
        data += part
    return bytes(data)
