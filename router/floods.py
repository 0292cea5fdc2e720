"""Keeps the program's own log readable, and the disk that it goes to: no flood of one line, and no line without end."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable

MOST = 5
"""Times that the same is said in EVERY_S; how often it was not said is told when it is said again."""
EVERY_S = 10.0
MAX_LINES = 500
"""That are remembered; beyond, those said first are forgotten."""
MAX_CHARACTERS = 8000
"""Of one message. What is longer quotes something that somebody else wrote."""


class _Said:
    __slots__ = ("left_out", "since", "times")

    def __init__(self, since: float) -> None:
        self.since = since
        self.times = 0
        self.left_out = 0


class Floods(logging.Filter):
    """Of a handler. `clock` is monotonic."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self._clock = clock
        self._said: OrderedDict[tuple[str, str], _Said] = OrderedDict()

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if len(text) > MAX_CHARACTERS:
            text = f"{text[:MAX_CHARACTERS]}... and {len(text) - MAX_CHARACTERS} characters more"
        now = self._clock()
        said = self._said.get((record.name, text))
        if said is None:
            said = self._said[record.name, text] = _Said(now)
            if len(self._said) > MAX_LINES:
                self._said.popitem(last=False)
        elif now - said.since >= EVERY_S:
            if said.left_out:
                text += f" (and {said.left_out} times more in the {now - said.since:.0f} s before)"
            said.since, said.times, said.left_out = now, 0, 0
        said.times += 1
        if said.times > MOST:
            said.left_out += 1
            return False
        record.msg, record.args = text, None
        return True
