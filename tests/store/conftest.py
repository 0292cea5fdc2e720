"""Servers for the tests of stores: each that is found, and at least one. Never skipped."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.store.servers import NEEDED, Server, binaries

Start = Callable[..., Server]
"""Starts a server; arguments as `Server` has them, the binary left out."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "binary" in metafunc.fixturenames:
        found = binaries() or {"none": ""}
        if metafunc.module.__name__.endswith("test_many"):  # several servers a test, for half a minute
            found = dict([next(iter(found.items()))])
        metafunc.parametrize("binary", found.values(), ids=found.keys(), scope="module")


@pytest.fixture
def start(binary: str) -> Iterator[Start]:
    """Starts servers, which are gone after the test."""
    assert binary, NEEDED
    started: list[Server] = []

    def start(*options: str, port: int = 0, sentinel: str = "") -> Server:
        started.append(Server(binary, *options, port=port, sentinel=sentinel))
        started[-1].start()
        return started[-1]

    yield start
    for server in started:
        server.remove()


@pytest.fixture(scope="module")
def shared_server(binary: str) -> Iterator[Server]:
    """One for all tests of a module, which do it no harm."""
    assert binary, NEEDED
    server = Server(binary)
    server.start()
    yield server
    server.remove()
