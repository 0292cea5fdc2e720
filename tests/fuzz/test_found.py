"""What the fuzz has found, each as a case of its own. What replicas may not say: `tests/hardening/test_lying.py`."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from random import Random

import pytest

from tests.fakes.upstream import chunked
from tests.fuzz.case import TIMEOUTS, Case, Client, Peer
from tests.fuzz.oracle import Asked, Relay


class Saying(Peer):
    """Answers each request with as many bytes as its target says, in one read."""

    def _asked(self, asked: Asked) -> None:
        self.relay = Relay(asked)
        self._case.relays.append(self.relay)
        self.outgoing = deque([chunked(b"x" * int(asked.target.partition(b"?")[2]))])


class Scripted(Case):
    """One client, which reads nothing, before one replica."""

    peer = Saying

    def begin(self) -> None:
        """The client connects."""
        self.strict = True
        self.clients = [Client(self.rng, 0, 0.0)]
        self.clients[0].pieces.clear()
        self._begin()
        self.transport = self.clients[0].transport
        self.transport.reads_nothing = True

    def feed(self, data: bytes) -> None:
        """The client sends, and all happens that follows from it."""
        self.transport.feed(data)
        self.loop.settle()
        while self._step():
            self.loop.settle()


@pytest.fixture
def case() -> Iterator[Scripted]:
    scripted = Scripted(Random(0))
    asyncio._set_running_loop(scripted.loop)
    scripted.begin()
    yield scripted
    asyncio._set_running_loop(None)


def old(size: int) -> bytes:
    """A request for an answer of that size, by a client to which its end can only be told by closing, though it asks
    to go on."""
    return b"GET /v1/models?%d HTTP/1.0\r\nConnection: keep-alive\r\n\r\n" % size


def test_nothing_is_written_behind_the_last_answer(case: Scripted) -> None:
    """A request half received was refused for its time, behind an answer whose end is the connection's."""
    case.feed(old(1_000) + b"GET /half HTTP/1.0\r\n")
    assert bytes(case.transport.out).endswith(b"\r\n\r\n" + b"x" * 1_000)
    case.loop.pass_time(TIMEOUTS["header_s"] + 2)
    assert bytes(case.transport.out).endswith(b"\r\n\r\n" + b"x" * 1_000)


def test_nothing_is_asked_behind_the_last_answer(case: Scripted) -> None:
    """A client that read on set off the request behind it, though its connection was closing."""
    case.feed(old(100_000) + old(2_000))
    assert case.transport.is_closing()
    assert not case.transport.lost
    case.transport.read_on()
    case.loop.settle()
    assert sum(replica.served for replica in case.replicas) == 1
    assert case.transport.lost


def test_a_last_answer_that_is_never_read_is_given_up(case: Scripted) -> None:
    """It was waited for without end."""
    case.feed(old(1_000))
    case.loop.pass_time(TIMEOUTS["stalled_client_s"] + 2)
    assert case.transport.lost
    assert not case.proxy.downstreams
