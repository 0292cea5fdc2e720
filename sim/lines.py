"""Lines of recorded files, and errors that say where in them."""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TextIO, TypeVar

E = TypeVar("E", bound=Enum)

GZIP = b"\x1f\x8b"


@contextmanager
def opened(path: Path) -> Iterator[TextIO]:
    """The file's text, unpacked if it begins as gzip does. Raises ValueError when it cannot be read."""
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise ValueError(
                f"{path}: is a pipe or a device, which can be read but once: save it to a file, and name that"
            )
        with path.open("rb") as raw:
            packed = raw.read(len(GZIP)) == GZIP
        # Some editors put a byte order mark first.
        with gzip.open(path, "rt", encoding="utf-8-sig") if packed else path.open(encoding="utf-8-sig") as text:
            yield text
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ValueError(f"{path}: cannot be read: {why}: name a text file, plain or packed by gzip") from None


@dataclass(frozen=True, slots=True)
class Row:
    """One line's values by name. What is missing or is no such value raises ValueError with file, line, key, remedy."""

    path: Path
    line: int
    values: Mapping[str, object]

    def error(self, key: str, value: object, remedy: str) -> ValueError:
        return ValueError(f"{self.path}, line {self.line}: {key} is {shown(value)}: {remedy}")

    def get(self, key: str) -> object:
        if key not in self.values:
            raise ValueError(f"{self.path}, line {self.line}: {key} is missing: {_known(self.values)}")
        return self.values[key]

    def number(self, key: str) -> float:
        """Finite, 0 or more."""
        value = self.get(key)
        try:
            found = float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else math.nan
        except (ValueError, OverflowError):
            found = math.nan
        if not 0.0 <= found < math.inf:
            raise self.error(key, value, "write a number, 0 or more")
        return found

    def count(self, key: str, least: int = 0) -> int:
        """A whole number."""
        found = self.number(key)
        if found != int(found) or found < least:
            raise self.error(key, self.values[key], f"write a whole number, {least} or more")
        return int(found)

    def text(self, key: str) -> str:
        value = self.get(key)
        if not isinstance(value, str):
            raise self.error(key, value, "write a text")
        if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
            raise self.error(key, value, "write text: half of a surrogate pair is none")
        return value

    def one_of(self, key: str, kinds: type[E]) -> E:
        value = self.get(key)
        for kind in kinds:
            if kind.value == value:
                return kind
        raise self.error(key, value, f"write one of {', '.join(str(kind.value) for kind in kinds)}")

    def items(self, key: str) -> list[object]:
        value = self.get(key)
        if not isinstance(value, list):
            raise self.error(key, value, "write a list")
        return value

    def part(self, key: str) -> Row:
        """An object within."""
        return self.within(key, self.get(key))

    def parts(self, key: str) -> list[Row]:
        """Objects of a list within."""
        return [self.within(key, value) for value in self.items(key)]

    def within(self, key: str, value: object) -> Row:
        if not isinstance(value, dict):
            raise self.error(key, value, "write an object")
        return Row(self.path, self.line, value)


def shown(value: object) -> str:
    """As it is told in an error: lines of recorded files may be long."""
    told = repr(value)
    return told if len(told) <= 80 else f"{told[:77]}..."


def _known(values: Mapping[str, object]) -> str:
    return f"the line has {', '.join(values) or 'nothing'}"


def rows(path: Path) -> Iterator[Row]:
    """One JSON object a line. Raises ValueError for a line that is none."""
    with opened(path) as text:
        for number, line in enumerate(text, 1):
            if line.strip():
                yield parsed(path, number, line)


def parsed(path: Path, number: int, line: str) -> Row:
    """A line that is a JSON object. Raises ValueError where it is none."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}, line {number}: no JSON: {error}: write one object a line") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}, line {number}: {line[:40]!r} is no JSON object: write one object a line")
    return Row(path, number, found)
