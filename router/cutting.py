"""Values cut to the length that a message can hold: what stands in a file may be of any size."""

from __future__ import annotations

from collections.abc import Callable

SHOWN_CHARS = 200
"""Of one value."""


def cut(text: str, most: int = SHOWN_CHARS) -> str:
    """The text, or how it begins."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


def written(value: object, masked: Callable[[str], str] = str) -> str:
    """A value as Python writes it, or how that begins. `masked` takes out what is not to be shown."""
    try:
        return cut(masked(repr(value)))
    except ValueError:
        return "a number of thousands of digits"  # which Python refuses to write
