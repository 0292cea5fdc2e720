"""Medians over repeats, as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import median

from benchmarks.run import Row

Cell = Callable[[Row, Row | None], float | None]
"""A figure of one row, given the direct row of the same repeat and shape."""


def _plain(*path: str) -> Cell:
    """The number at this path of the row, None when absent."""

    def cell(row: Row, direct: Row | None) -> float | None:
        value: object = row
        for name in path:
            value = value.get(name) if isinstance(value, dict) else None
        return float(value) if isinstance(value, int | float) else None

    return cell


def _added(*path: str) -> Cell:
    """The number at this path minus direct's."""
    plain = _plain(*path)

    def cell(row: Row, direct: Row | None) -> float | None:
        own, base = plain(row, None), plain(direct, None) if direct else None
        return own - base if own is not None and base is not None else None

    return cell


COLUMNS: dict[str, Cell] = {
    "CPU µs/request": _plain("cpu_us_per_request"),
    "CPU µs/chunk": _plain("cpu_us_per_chunk"),
    "rss MiB": _plain("rss_mib"),
    "first byte p50 ms": _plain("ttfb_ms", "p50"),
    "first byte p99 ms": _plain("ttfb_ms", "p99"),
    "added transit p50 ms": _added("transit_ms", "p50"),
    "added transit p99 ms": _added("transit_ms", "p99"),
    "requests/s": _plain("requests_per_s"),
}
"""Title and figure, of which the median is shown. "Added": less what the load saw without a router in that repeat."""

COUNTS: dict[str, str] = {"failed": "failed", "broken": "broken_streams"}
"""Title and field of what is summed over the repeats: one failure must not vanish in a median."""


def markdown(rows: Sequence[Row]) -> str:
    """One table per shape, a line per router in the order they were measured."""
    parts = []
    for shape in dict.fromkeys(row["shape"] for row in rows):
        of_shape = [row for row in rows if row["shape"] == shape]
        repeats = len({row["repeat"] for row in of_shape})
        direct = {row["repeat"]: row for row in of_shape if row["name"] == "direct" and "error" not in row}
        parts.append(f"### {shape} (median of {repeats})\n")
        parts.append("| router | " + " | ".join([*COLUMNS, *COUNTS]) + " |")
        parts.append("|---|" + "---:|" * (len(COLUMNS) + len(COUNTS)))
        for name in dict.fromkeys(row["name"] for row in of_shape):
            own = [row for row in of_shape if row["name"] == name]
            good = [row for row in own if "error" not in row]
            cells = [_median(cell(row, direct.get(row["repeat"])) for row in good) for cell in COLUMNS.values()]
            cells += [str(sum(row[field] for row in good)) for field in COUNTS.values()]
            note = f" ({len(own) - len(good)} of {len(own)} failed)" if len(good) < len(own) else ""
            parts.append(f"| {name}{note} | " + " | ".join(cells) + " |")
        parts.append("")
    return "\n".join(parts)


def _median(values: Iterable[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    middle = median(known)
    return f"{middle:.0f}" if abs(middle) >= 1000 else f"{middle:.3g}"
