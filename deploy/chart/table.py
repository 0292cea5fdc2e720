"""The table of values in the chart's README, from the comments of values.yaml."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

import yaml

_LINE = re.compile(r"(?P<indent> *)(?:# ?(?P<comment>.*)|(?P<key>[A-Za-z_]\w*):.*)")


@dataclass(frozen=True, slots=True)
class Value:
    """A key of values.yaml, and what the comment above it says."""

    path: tuple[str, ...]
    default: str
    """As JSON; empty for a section."""
    comment: str


def values(text: str) -> Iterator[Value]:
    """Every key that holds no others, and those above them that have a comment."""
    tree = yaml.safe_load(text)
    path: list[str] = []
    comment: list[str] = []
    for line in text.splitlines():
        found = _LINE.fullmatch(line)
        if found is None:  # an entry of a list, or nothing
            comment = []
        elif found["key"] is None:
            comment.append(found["comment"])
        else:
            path[len(found["indent"]) // 2 :] = [found["key"]]
            default = tree
            for key in path:
                default = default[key]
            inner = isinstance(default, dict) and line.endswith(":")
            if comment or not inner:
                yield Value(tuple(path), "" if inner else json.dumps(default), " ".join(comment))
            comment = []


def table(text: str) -> str:
    """In Markdown, a row for each."""
    rows = ["| value | default | meaning |", "|---|---|---|"]
    for value in values(text):
        default = value.default and f"`{value.default}`"
        rows.append(f"| `{'.'.join(value.path)}` | {default} | {value.comment} |")
    return "\n".join(rows) + "\n"
