"""What is said again and again, and what has no end."""

from __future__ import annotations

import logging

import pytest

from router.floods import EVERY_S, MAX_CHARACTERS, MAX_LINES, MOST, Floods


class Log:
    """A logger with the filter, and what came through."""

    def __init__(self) -> None:
        self.now = 0.0
        self.lines: list[str] = []
        self.floods = Floods(lambda: self.now)
        self.logger = logging.Logger("warmroute.test")
        handler = logging.Handler()
        handler.emit = lambda record: self.lines.append(record.getMessage())  # type: ignore[method-assign]
        handler.addFilter(self.floods)
        self.logger.addHandler(handler)


@pytest.fixture
def log() -> Log:
    return Log()


def test_a_flood_is_cut_and_counted(log: Log) -> None:
    for _ in range(100):
        log.logger.warning("the %s is away", "store")
        log.now += 0.01
    assert log.lines == ["the store is away"] * MOST
    log.now += EVERY_S
    log.logger.warning("the %s is away", "store")
    assert log.lines[MOST:] == ["the store is away (and 95 times more in the 11 s before)"]


def test_what_is_said_now_and_then_is_said_as_it_is(log: Log) -> None:
    for _ in range(20):
        log.logger.warning("the store is away")
        log.now += EVERY_S / MOST
    assert log.lines == ["the store is away"] * 20


def test_a_flood_of_one_hides_no_other(log: Log) -> None:
    for number in range(100):
        log.logger.warning("the store is away")
        log.logger.warning("replica r%d is out", number)
    assert [line for line in log.lines if "replica" in line] == [f"replica r{number} is out" for number in range(100)]


def test_a_line_without_end_is_cut(log: Log) -> None:
    log.logger.error("no URL: %r", "x" * 1_000_000)
    [line] = log.lines
    assert len(line) < MAX_CHARACTERS + 100
    assert line.endswith("characters more")


def test_what_is_remembered_is_bounded(log: Log) -> None:
    for number in range(3 * MAX_LINES):
        log.logger.error("line %d", number)
    assert len(log.floods._said) == MAX_LINES
