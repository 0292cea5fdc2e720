"""One control plane for the whole run, and a namespace of each test's own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kubernetes.server import ControlPlane


@pytest.fixture(scope="session")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with ControlPlane(tmp_path_factory.mktemp("kubernetes")) as plane:
        yield plane
