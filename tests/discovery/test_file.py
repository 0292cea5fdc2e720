"""Replicas in a file that somebody writes while it is read."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from router.discovery import feed as discovery_feed
from router.discovery.file import FileSource
from router.source import Content
from tests.discovery.followed import followed

LOOK_S = 0.02


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FileSource, "longest_pause_s", LOOK_S)
    monkeypatch.setattr(discovery_feed, "FIRST_PAUSE_S", LOOK_S)


class Written:
    """The file, and who writes it."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._path = path

    def write(self, text: str) -> None:
        self._path.write_text(text)

    def spoil(self) -> None:
        self._path.write_bytes(b"\xff\xfe\x00")

    def remove(self) -> None:
        self._path.unlink()


@pytest.fixture
def file(tmp_path: Path) -> Written:
    return Written(tmp_path / "replicas.yaml")


async def test_a_list_as_replicas_is_written_and_what_becomes_of_it(file: Written) -> None:
    file.write("- http://10.0.0.1:30000/\n- {id: b, url: 'HTTP://10.0.0.2:30000', weight: 2}\n")
    async with followed(FileSource(file.name, LOOK_S)) as seen:
        first = await seen.ids("http://10.0.0.1:30000", "b")
        assert (first["b"].url, first["b"].weight) == ("http://10.0.0.2:30000", 2)
        file.write(json.dumps([{"id": "c", "url": "http://10.0.0.3:30000"}]))
        await seen.ids("c")
        file.write("[{id: c, url: 'http://10.0.0.3:30000', ranks: 2}]")
        assert [each.rank for each in (await seen.ids("c@0", "c@1")).values()] == [0, 1]
        file.write("[]")
        await seen.ids()


async def test_a_configmap_is_swapped_under_its_mount(tmp_path: Path) -> None:
    """`..data` leads to a folder, and is exchanged by a rename."""

    def swap(name: str, text: str) -> None:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "replicas.yaml").write_text(text)
        (tmp_path / "..tmp").symlink_to(name)
        os.replace(tmp_path / "..tmp", tmp_path / "..data")

    swap("..1", "[{id: a, url: 'http://a:1'}]")
    mounted = tmp_path / "replicas.yaml"
    mounted.symlink_to("..data/replicas.yaml")
    async with followed(FileSource(str(mounted), LOOK_S)) as seen:
        await seen.ids("a")
        swap("..2", "[{id: b, url: 'http://b:1'}]")
        await seen.ids("b")


def write(text: str) -> Callable[[Written], object]:
    return lambda file: file.write(text)


BAD = {
    "half of it": (write("- http://10.0.0.1:30000\n- {id: b, url"), "it is not good YAML"),
    "a key twice": (write("- {url: 'http://a:1', url: 'http://b:1'}"), "the key 'url' is given twice"),
    "a tag that forbids its value": (write("- !!timestamp x"), "it is not good YAML"),
    "emptied": (write(""), "expected a list of replicas, got NoneType: write [] where there are to be none"),
    "a mapping": (write("replicas: []"), "expected a list of replicas, got dict"),
    "no URL": (write("- 10.0.0.1:30000"), "'10.0.0.1:30000'"),
    "an unknown key": (write("- {url: 'http://a:1', wight: 2}"), "0.wight"),
    "twice": (write("- http://a:1\n- HTTP://A:1/"), "http://a:1 is given twice"),
    "not text": (Written.spoil, "give a readable text file"),
    "gone": (Written.remove, "No such file or directory: give a readable text file"),
}


@pytest.mark.parametrize("name", BAD)
async def test_what_cannot_be_read_counts_for_nothing(file: Written, name: str) -> None:
    spoil, why = BAD[name]
    file.write("[{id: a, url: 'http://a:1'}]")
    async with followed(FileSource(file.name, LOOK_S)) as seen:
        await seen.ids("a")
        spoil(file)
        await seen.trouble(why)
        assert len(seen.sets) == 1
        file.write("[{id: a, url: 'http://a:1'}]")
        await seen.until(lambda: seen.feed.up, "it is what it was")
        file.write("[{id: b, url: 'http://b:1'}]")
        await seen.ids("b")
        assert all(set(each) <= {"a", "b"} for each in seen.sets)


async def test_the_file_may_come_later(file: Written) -> None:
    async with followed(FileSource(file.name, LOOK_S)) as seen:
        await seen.trouble("No such file or directory")
        assert not seen.feed.heard
        file.write("[{id: a, url: 'http://a:1'}]")
        await seen.ids("a")


def test_a_file_that_is_being_written_is_waited_for(file: Written) -> None:
    """Each piece may be good YAML, and say less than the whole."""
    file.write("- http://a:1\n- http://b:1\n")
    content = Content(file.name)
    content.note()
    assert not content.changed()
    file.write("- http://a:1\n")
    assert not content.changed(), "it may go on"
    file.write("- http://a:1\n- http://c:1\n")
    assert not content.changed(), "and it did"
    assert content.changed()
