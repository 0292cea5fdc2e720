"""What tests of several workers share."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.workers.manned import Manned


@pytest.fixture
async def manned(tmp_path: Path) -> AsyncIterator[Manned]:
    """Not started yet; what it started is ended after the test."""
    manned = Manned(tmp_path)
    yield manned
    await manned.stop()
