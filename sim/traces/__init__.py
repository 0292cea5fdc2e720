"""Recorded traffic from files of several formats, to be played to a simulated fleet.

`load` reads a file into a `Trace`; `TraceWorkload` plays it. A module for each format knows its files by their first
line. Files may be packed by gzip.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from sim.lines import opened, rows, shown
from sim.traces import claude_code, dynamo, journal, mini_swe, mooncake, table
from sim.traces.trace import Session, Step, Trace
from sim.traces.workload import TraceWorkload

__all__ = ["FORMATS", "Session", "Step", "Trace", "TraceWorkload", "load"]

FORMATS: dict[str, ModuleType] = {
    module.NAME: module for module in (claude_code, mooncake, table, mini_swe, dynamo, journal)
}


def load(path: Path, format: str | None = None) -> Trace:
    """A trace from a file; its format is told by the first line unless one is insisted on.

    Raises ValueError with file, line, key, value and remedy where it is none, and for a trace without requests.
    """
    module = FORMATS.get(format) if format is not None else _recognised(path)
    if module is None:
        raise ValueError(f"format must be one of {', '.join(FORMATS)}, got {format!r}")
    trace: Trace = module.load(path)
    if not trace.sessions:
        raise ValueError(f"{path}: no request is in it")
    return trace


def _recognised(path: Path) -> ModuleType:
    with opened(path) as text:
        beginning = next((line.lstrip()[0] for line in text if line.strip()), "")
    first = next(rows(path) if beginning in ("{", "[", "") else table.table_rows(path), None)
    if first is None:
        raise ValueError(
            f"{path}: no request is in it: write one JSON object a line, or a head and a table's lines below"
        )
    for module in FORMATS.values():
        if module.recognises(first):
            return module
    raise ValueError(
        f"{path}, line {first.line}: the keys {', '.join(map(shown, list(first.values)[:8]))} are of no known format: "
        f"name it, one of {', '.join(FORMATS)}"
    )
