"""The folder of the workers' sockets, and those that killed supervisors left."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from router.workers.folder import PREFIX, sockets_folder
from tests.router.test_cli import ended
from tests.workers.manned import Manned


@pytest.fixture(autouse=True)
def parent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where folders are made; not in `tmp_path`, which is too long for sockets."""
    with tempfile.TemporaryDirectory() as name:
        monkeypatch.setenv("TMPDIR", name)
        monkeypatch.setattr(tempfile, "tempdir", None)
        yield Path(name)


def inside(parent: Path) -> list[Path]:
    return list(parent.iterdir())


def old(path: Path) -> Path:
    os.utime(path, (0, 0))
    return path


async def test_what_a_killed_supervisor_left_is_removed_by_the_next(manned: Manned, parent: Path) -> None:
    await manned.start("a")
    [left] = inside(parent)
    manned.router.signal(signal.SIGKILL)
    await ended(manned.router)
    assert inside(parent) == [left]
    old(left)
    await manned.serve()
    [new] = inside(parent)
    assert new != left
    manned.router.signal(signal.SIGTERM)
    assert await ended(manned.router) == 0
    assert inside(parent) == []


def test_what_others_have_is_left(parent: Path) -> None:
    with sockets_folder() as living:
        kept = {old(living)}
        for name in ("release-x", f"{PREFIX}new", f"{PREFIX}old"):
            (parent / name).mkdir()
            kept.add(parent / name)
        link = parent / f"{PREFIX}link"
        link.symlink_to(old(parent / "release-x"))
        left = parent / f"{PREFIX}old"
        (left / "w1.1.sock").write_text("")
        old(left)
        with sockets_folder() as another:
            assert set(inside(parent)) == (kept - {left}) | {link, another}
        assert set(inside(parent)) == (kept - {left}) | {link}
