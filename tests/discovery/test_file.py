"""Replicas in a file that somebody writes while it is read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from router.discovery import feed as discovery_feed
from router.discovery import file as discovery_file
from router.discovery.feed import MAX_TARGETS
from router.discovery.file import MAX_BYTES, FileSource, read
from tests.discovery.followed import Followed, followed
from tests.fakes.logged import logged
from tests.fakes.wire import LIMIT_S

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

    def replace(self, text: str) -> None:
        """By a rename, so that it is never half of it."""
        beside = self._path.with_suffix(".new")
        beside.write_text(text)
        beside.replace(self._path)

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


async def test_a_file_that_is_being_written_is_waited_for(file: Written) -> None:
    """Each piece may be good YAML, and say less than the whole."""
    file.write("- http://a:1\n- http://b:1\n")
    source = FileSource(file.name, LOOK_S)
    feed = Followed(source).feed

    async def look(text: str) -> int:
        await source._look(text.encode(), feed)
        return len(feed.targets)

    assert await look("- http://a:1\n- http://b:1\n") == 2
    assert await look("- http://a:1\n") == 2, "it may go on"
    assert await look("- http://a:1\n- http://c:1\n- http://d:1\n") == 2, "and it did"
    assert await look("- http://a:1\n- http://c:1\n- http://d:1\n") == 3


async def test_a_file_that_is_never_the_same_twice_is_complained_about(
    file: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery_file, "CHANGING_S", 0.1)
    file.write("- {id: a, url: 'http://a:1'}")
    async with followed(FileSource(file.name, LOOK_S)) as seen:
        await seen.ids("a")
        at = 0

        def again() -> bool:
            nonlocal at
            at += 1
            file.replace(f"- {{id: b, url: 'http://b:{at}'}}")
            return not seen.feed.up

        await seen.until(again, "it is written all the time")
        assert "it changes all the time" in seen.feed.why
        assert set(seen.last) == {"a"}
        file.write("- {id: c, url: 'http://c:1'}")
        await seen.ids("c")


# What is in the file's place


def directory(file: Written) -> None:
    file.remove()
    os.mkdir(file.name)


def pipe(file: Written) -> None:
    """Nobody writes there: whoever opens it waits."""
    file.remove()
    os.mkfifo(file.name)


def endless(file: Written) -> None:
    file.remove()
    os.symlink("/dev/zero", file.name)


def loop(file: Written) -> None:
    file.remove()
    os.symlink(file.name, file.name)


UNREADABLE = {
    "a directory": (directory, "Is a directory"),
    "a pipe": (pipe, "a pipe or a device: give a readable text file"),
    "a device without an end": (endless, "a pipe or a device: give a readable text file"),
    "a link to itself": (loop, "symbolic links"),
    "too large": (write(" " * (MAX_BYTES + 1)), f"has {MAX_BYTES + 1} bytes, and {MAX_BYTES} are the most"),
}


@pytest.mark.parametrize("name", UNREADABLE)
async def test_what_is_no_file_to_read_is_told_once_and_changes_nothing(
    file: Written, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    put, why = UNREADABLE[name]
    file.write("- {id: a, url: 'http://a:1'}")
    async with followed(FileSource(file.name, LOOK_S)) as seen:
        await seen.ids("a")
        put(file)
        await seen.trouble(why)
        before = seen.feed.faults
        await seen.until(lambda: seen.feed.faults >= before + 3, "it is looked at again")
        assert set(seen.last) == {"a"}
        os.rmdir(file.name) if name == "a directory" else file.remove()
        file.write("- {id: a, url: 'http://a:1'}")
        await seen.until(lambda: seen.feed.up, "what it held before")
    assert len([each for each in logged(caplog, "warmroute.discovery") if why in each.message]) == 1


async def test_a_file_system_that_hangs_is_told_and_asked_once(file: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery_file, "ANSWER_S", 0.1)
    answers, asked = threading.Event(), []

    def hang(name: str, most_bytes: int) -> bytes:
        asked.append(name)
        answers.wait(LIMIT_S)
        return b"- {id: b, url: 'http://b:1'}"

    file.write("- {id: a, url: 'http://a:1'}")
    async with followed(FileSource(file.name, LOOK_S)) as seen:
        await seen.ids("a")
        monkeypatch.setattr(discovery_file, "bytes_of", hang)
        await seen.trouble("does its file system hang?")
        before = seen.feed.faults
        await seen.until(lambda: seen.feed.faults >= before + 2, "it hangs on")
        assert asked == [file.name], "one thread waits, however often it is looked at"
        assert set(seen.last) == {"a"}
        answers.set()
        await seen.ids("b")


def test_ten_thousand_replicas_fit() -> None:
    """At their usual lengths."""
    host = "sglang-{}.sglang.inference-production.svc.cluster.local"
    lines = [f"- {{url: 'http://{host.format(each)}:30000', id: 'sglang-{each}', weight: 1}}\n" for each in range(10)]
    assert max(map(len, lines)) + len("9999") * 2 <= MAX_BYTES / MAX_TARGETS


HOSTILE = {
    "aliases to aliases": "- [&a [x,x,x,x,x,x,x,x,x]"
    + "".join(f",&{name} [{','.join([f'*{of}'] * 9)}]" for of, name in pairwise("abcdefghij"))
    + "]",
    "a long text under many aliases": "- [&a '" + "x" * 100_000 + "'" + ",*a" * 1000 + "]",
    "a long URL": "- 'http://" + "x" * 1_000_000 + "'",
    "a long text": "- '" + "x" * 1_000_000 + "'",
    "a long id": "- {url: 'http://a:1', id: '" + "x" * 1_000_000 + "'}",
    "a long key": "- {url: 'http://a:1', ? '" + "x" * 1_000_000 + "' : 1}",
    "a long key twice": "- {? '" + "x" * 1_000_000 + "' : 1, ? '" + "x" * 1_000_000 + "' : 1}",
    "a long number": "- {url: 'http://a:1', weight: 0x" + "f" * 10_000 + "}",
    "many values": "- {url: 'http://a:1', id: [" + "1," * 100_000 + "]}",
    "an alias that contains itself": "&a [*a]",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_nothing_in_a_file_makes_a_long_message(name: str) -> None:
    with pytest.raises(ValueError, match=r".{10}") as told:
        read(HOSTILE[name].encode())
    assert len(str(told.value)) < 2_000


def test_aliases_may_stand_for_what_is_written_out() -> None:
    found = read(
        b"- &a {url: 'http://a:1', weight: &w 2}\n- {<<: *a, url: 'http://b:1'}\n- {url: 'http://c:1', weight: *w}"
    )
    assert [(each.url, each.weight) for each in found] == [("http://a:1", 2), ("http://b:1", 2), ("http://c:1", 2)]


def test_a_process_ends_while_a_file_is_read(file: Written) -> None:
    """As with a file system that hangs for good."""
    code = """
import asyncio, sys, threading
from router.aside import aside

async def main():
    aside(threading.Event().wait)
    print("reads", flush=True)

asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S, check=True)
    assert done.stdout == "reads\n"
