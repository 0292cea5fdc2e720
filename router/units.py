"""Figures, times and addresses as people read them. Numbers have their unit."""

from __future__ import annotations

import json


def counted(count: int, noun: str) -> str:
    """A number and what it counts: `1 replica`, `2 replicas`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def tokens(count: float) -> str:
    """As in `812`, `12.3 k`, `1.24 M`: three figures are all that anybody compares. The word is the caller's."""
    if count < 1000:
        return f"{count:.0f}"
    for unit in ("k", "M", "G"):
        count /= 1000
        if count < 999.5 or unit == "G":
            break
    return f"{count:.{2 if count < 9.995 else 1 if count < 99.95 else 0}f} {unit}"


def seconds(value: float) -> str:
    """Short times: milliseconds below a tenth of a second."""
    return f"{value:.1f} s" if value >= 0.0995 else f"{value * 1000:.0f} ms"


def duration(value: float) -> str:
    """How long something has been so: `8 s`, `3 min`, `2 h 5 min`, `4 d 1 h`."""
    whole = int(value)
    for size, name, below, less in ((86_400, "d", 3600, "h"), (3600, "h", 60, "min")):
        if whole >= size:
            rest = whole % size // below
            return f"{whole // size} {name} {rest} {less}" if rest else f"{whole // size} {name}"
    return f"{whole // 60} min" if whole >= 60 else f"{whole} s"


def percent(share: float) -> str:
    """A share of one, as in `93.4 %`; what is not quite all is not called 100."""
    shown = f"{share * 100:.1f}" if share < 0.9995 or share >= 1 else "99.9"
    return f"{shown.removesuffix('.0')} %"


def clock(iso: str) -> str:
    """The time of day of a date and time, to the second."""
    return iso[11:19]


def brief(value: object, chars: int = 80) -> str:
    """A value as JSON, cut where it is longer than so many characters."""
    text = json.dumps(value)
    return text if len(text) <= chars else f"{text[: chars - 3]}..."


def short(text: str) -> str:
    """Without the scheme of each URL in it: it tells nothing, and takes a third of a name's width."""
    return text.replace("http://", "").replace("https://", "")
