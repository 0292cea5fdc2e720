"""What a setting of some type is to look like, in words: for what pydantic found to be none."""

from __future__ import annotations

import re
from typing import Any

_BYTES = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_SECONDS = {"ms": 0.001, "s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400}
_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+)\s*")

_TYPES = {
    "int": "expected a whole number",
    "float": "expected a number",
    "bool": "expected true or false",
    "string": "expected a text",
    "list": "expected a list, as in [a, b]",
    "dict": "expected a mapping of keys",
    "model": "expected a mapping of keys",
}
"""By how the names of pydantic's faults begin."""


def expectation(key: str, fault: str, message: str) -> str:
    """What was expected at a key. `fault` is its type and `message` its text, as pydantic has them."""
    if fault == "missing":
        return "is missing: set it"
    if fault == "int_from_float":
        return f"{_TYPES['int']}{_unit(key)}"
    if fault == "too_long":  # of a list
        return message.replace("List should have at most", "takes at most").replace(" after validation", "")
    kind, _, what = fault.partition("_")
    if kind in _TYPES and what in ("type", "parsing"):
        return f"{_TYPES[kind]}{_unit(key) if kind in ('int', 'float') else ''}"
    return message.removeprefix("Value error, ").replace("Input should be", "must be", 1)


def remedy(key: str, fault: str, value: Any) -> str:
    """What to write instead of the value, behind it; empty where nobody can tell."""
    kind = fault.partition("_")[0]
    if fault == "too_long":
        return ": leave some out"
    if value is None and kind in _TYPES:
        return ": write one, or leave the key out"
    if kind == "string" and isinstance(value, int | float):
        return f': write "{value}", in quotes'
    if kind in ("int", "float") and isinstance(value, str) and (number := _plain(key, value)) is not None:
        return f": write {number}"
    return ""


def _unit(key: str) -> str:
    for ending, unit in (("_bytes", " of bytes"), ("_s", " of seconds"), ("_tokens", " of tokens")):
        if key.endswith(ending):
            return f"{unit}, without unit"
    return ""


def _plain(key: str, text: str) -> str | None:
    """A quantity with a unit in the unit of the key; None where it is none."""
    if (match := _QUANTITY.fullmatch(text)) is None:
        return None
    number, unit = float(match[1]), match[2].lower()
    if key.endswith("_bytes"):
        size = re.fullmatch(r"([kmgt]?)(i?)b?|bytes?", unit)
        if size is None:
            return None
        prefix = size[1] or ""
        return f"{number * (1024 if size[2] or not unit.endswith('b') else 1000) ** _BYTES[prefix]:.0f}"
    if key.endswith("_s") and unit in _SECONDS:
        return f"{number * _SECONDS[unit]:g}"
    return None
