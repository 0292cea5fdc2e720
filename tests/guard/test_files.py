"""Files that are read anew when they change: once for each change, and never to the harm of what is in force."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from router.files import Files


class Watched:
    """Reads a file, and refuses one that says so."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.value = path.read_text()
        self.reads = 0

    def reload(self) -> None:
        self.reads += 1
        if not self.path.exists() or self.path.read_text() == "bad":
            raise ValueError(f"{self.path} is bad: write another")
        self.value = self.path.read_text()


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    path = tmp_path / "file"
    path.write_text("one")
    return Watched(path)


@pytest.fixture
def files(watched: Watched) -> Files:
    files = Files()
    files.watch("a thing", [str(watched.path)], watched.reload)
    return files


def test_a_change_is_read_once(files: Files, watched: Watched, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "warmroute.files")
    files.check()
    assert watched.reads == 0
    watched.path.write_text("another")
    files.check()
    files.check()
    assert (watched.value, watched.reads) == ("another", 1)
    assert "a thing changed, and was read anew" in caplog.text


def test_a_fault_is_told_once_and_mended_by_the_next_change(
    files: Files, watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    watched.path.write_text("bad")
    files.check()
    files.check()
    assert (watched.value, watched.reads) == ("one", 1)
    assert caplog.text.count("cannot be used, so what was read before stays in force") == 1
    watched.path.unlink()
    files.check()
    assert watched.value == "one"
    watched.path.write_text("again")
    files.check()
    assert watched.value == "again"


def test_a_link_that_leads_elsewhere_is_a_change(tmp_path: Path) -> None:
    """As Kubernetes changes a Secret: all files at once, by one link to their folder."""
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tls.crt").write_text(name)
    (tmp_path / "..data").symlink_to("old")
    (tmp_path / "tls.crt").symlink_to("..data/tls.crt")
    watched = Watched(tmp_path / "tls.crt")
    files = Files()
    files.watch("a secret", [str(watched.path)], watched.reload)
    (tmp_path / "..tmp").symlink_to("new")
    (tmp_path / "..tmp").rename(tmp_path / "..data")
    files.check()
    assert watched.value == "new"


def test_what_is_watched_anew_replaces_what_was(files: Files, watched: Watched) -> None:
    files.watch("a thing", [], watched.reload)
    watched.path.write_text("another")
    files.check()
    assert watched.reads == 0
