"""What tests of running routers share."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.fakes.operated import Operated


@pytest.fixture
async def operated(tmp_path: Path) -> AsyncIterator[Operated]:
    """Not started yet; what it started is ended after the test."""
    operated = Operated(tmp_path)
    yield operated
    await operated.stop()
