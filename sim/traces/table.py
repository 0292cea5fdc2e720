"""Tables of requests: when each came and how many tokens went in and out. Nothing ties two of them together.

The CSV files of Azure's LLM inference traces (https://github.com/Azure/AzurePublicDataset, Splitwise, ISCA'24) and of
BurstGPT (https://github.com/HPMLL/BurstGPT, arXiv 2401.17644). Requests without output have failed; they are left out.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from sim.lines import Row, opened
from sim.traces.trace import Session, Step, Trace

NAME = "table"

_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_BURSTGPT = ("Timestamp", "Request tokens", "Response tokens")


def recognises(first: Row) -> bool:
    return any(set(columns) <= set(first.values) for columns in (_AZURE, _BURSTGPT))


def table_rows(path: Path) -> Iterator[Row]:
    """The lines below the header."""
    with opened(path) as text:
        reader = csv.DictReader(text)
        try:
            while reader.fieldnames is not None and not reader.fieldnames:
                reader.fieldnames = None  # an empty line above the head
            for values in reader:
                yield Row(path, reader.line_num, {str(key): value for key, value in values.items()})
        except csv.Error as error:
            raise ValueError(
                f"{path}, line {reader.line_num}: no CSV: {error}: write a head and lines below it"
            ) from None


def load(path: Path) -> Trace:
    """Raises ValueError naming file, line, key, value and remedy."""
    found: list[tuple[float, int, int]] = []
    for row in table_rows(path):
        time, prompt, output = _AZURE if _AZURE[0] in row.values else _BURSTGPT
        if row.count(output):
            found.append((_seconds(row, time), row.count(prompt, 1), row.count(output)))
    found.sort()
    first = found[0][0] if found else 0.0
    return Trace(
        NAME,
        1,
        tuple(
            Session(str(number), (Step(prompt, output, at_s=at - first),))
            for number, (at, prompt, output) in enumerate(found)
        ),
    )


def _seconds(row: Row, key: str) -> float:
    """A number of seconds, or a date and time, of UTC unless it says otherwise."""
    given = str(row.get(key))
    try:
        float(given)  # BurstGPT's 10400101.12 is no noon of the year 1040
    except ValueError:
        with suppress(ValueError):
            time = datetime.fromisoformat(given)
            return (time if time.tzinfo is not None else time.replace(tzinfo=UTC)).timestamp()
    return row.number(key)
