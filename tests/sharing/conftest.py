"""Replicas, a store and routers as processes, for tests that ask for them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.sharing.several import Several, emulators, made_for


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    with emulators(tmp_path_factory.mktemp("emulators") / "log") as urls:
        yield urls


@pytest.fixture
async def several(tmp_path: Path, replicas: list[str]) -> AsyncIterator[Several]:
    async with made_for(tmp_path, replicas) as several:
        yield several
