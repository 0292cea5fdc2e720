"""The router's decision journal, read back: every call that its Balancer got, in order.

What the lines mean is told in docs/operations.md; router/calls.py has them from the other side.
"""

from __future__ import annotations

import binascii
import re
from base64 import b64decode
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TextIO

from policies.directory import LINK_BYTES
from policies.sharing import Note
from policies.types import Load, Request
from sim.lines import Row, opened, parsed

FORMAT = 1
"""Of the lines that are understood."""


def calls(path: Path) -> Iterator[Row]:
    """All lines of the files that are left of a journal, the oldest first. `path` is the newest file's.

    A file named with its number, as in `journal.jsonl.2`, is read alone. The router may go on writing meanwhile. Raises
    ValueError where it is none.
    """
    last: Row | None = None
    with ExitStack() as open_files:  # all at once: files that are renamed meanwhile stay what they are
        parts = [(part, open_files.enter_context(opened(part))) for part in _parts(path)]
        for part, text in parts:
            first = True
            for row in _rows(part, text):
                if first and row.values.get("call") != "journal":
                    raise row.error("call", row.values.get("call"), "a journal's file begins with a call 'journal'")
                if row.values.get("call") == "journal" and row.get("format") != FORMAT:
                    raise row.error("format", row.get("format"), f"read it with the version {row.get('version')}")
                first, last = False, row
                yield row
    if last is None:
        raise ValueError(f"{path}: no call is in it: name the newest file of a router's journal")


def _rows(path: Path, text: TextIO) -> Iterator[Row]:
    """The lines of a file but those that were cut off: the last one, and what a full disk left before a header."""
    cut: ValueError | None = None
    for number, line in enumerate(text, 1):
        if not line.strip():
            continue
        try:
            row = parsed(path, number, line)
        except ValueError as error:
            if not line.endswith("\n"):
                return
            cut = cut or error
            continue
        if cut is not None and row.values.get("call") != "journal":
            break
        cut = None
        yield row
    if cut is not None:
        raise cut


def _parts(path: Path) -> list[Path]:
    if re.search(r"\.\d+$", path.name):
        return [path]
    older = [each for each in path.parent.glob(f"{path.name}.*") if each.suffix[1:].isdigit()]
    return [*sorted(older, key=lambda each: -int(each.suffix[1:])), path]


def request(row: Row) -> Request:
    """The request of an `acquire` or `explain`, without the replicas that failed it."""
    fingerprint = _bytes(row, "fingerprint")
    return Request(
        key=_bytes(row, "key"),
        parent=_bytes(row, "parent"),
        fingerprint=int.from_bytes(fingerprint) if fingerprint else 0,
        prompt_tokens=row.count("prompt_tokens") if "prompt_tokens" in row.values else 0,
        blocks=blocks(row),
        turn=row.values.get("turn") is not False,
        response=_bytes(row, "response"),
        pool=pool(row),
    )


def pool(row: Row) -> str:
    """Of a request or a replica; empty for the default one."""
    return row.text("pool") if "pool" in row.values else ""


def blocks(row: Row) -> tuple[int, ...]:
    """The chained hashes of a request's blocks."""
    packed = _packed(row, "blocks", 8)
    return tuple(int.from_bytes(packed[at : at + 8]) for at in range(0, len(packed), 8))


def note(row: Row, replica: str) -> Note:
    """What a `hear` tells of a home on that replica."""
    key, fingerprint = _bytes(row, "key"), _bytes(row, "fingerprint")
    if key is None:
        raise row.error("key", None, "write a digest in hexadecimal")
    return Note(
        key=key,
        fingerprint=int.from_bytes(fingerprint) if fingerprint else 0,
        chain=_packed(row, "chain", LINK_BYTES),
        fork=row.values.get("fork") is True,
        ratio=row.number("ratio") if "ratio" in row.values else 1.0,
        replica=replica,
        incarnation="",
        tokens=row.count("tokens"),
        counted=row.count("counted"),
    )


def load(row: Row) -> Load:
    """The load of a `report`."""
    part = row.part("load")
    at = part.number("at")
    if unknown := set(part.values) - set(Load.__dataclass_fields__):
        raise row.error("load", part.values, f"leave out {', '.join(sorted(unknown))}")
    speed = part.number("prefill_tokens_per_s") if "prefill_tokens_per_s" in part.values else None
    counts = {key: part.count(key) for key in part.values if key not in ("at", "prefill_tokens_per_s")}
    return Load(at, **counts, prefill_tokens_per_s=speed)


def optional(row: Row, key: str) -> int | None:
    """A count that may be missing."""
    return row.count(key) if row.values.get(key) is not None else None


def _packed(row: Row, key: str, size: int) -> bytes:
    """Hashes of so many bytes each, one behind the other; empty when there are none."""
    if key not in row.values:
        return b""
    given = row.text(key)
    with suppress(ValueError, binascii.Error):
        packed = b64decode(given, validate=True)
        if len(packed) % size == 0:
            return packed
    raise row.error(key, given, f"write hashes of {size} bytes in base64")


def _bytes(row: Row, key: str) -> bytes | None:
    if key not in row.values:
        return None
    given = row.text(key)
    try:
        return bytes.fromhex(given)
    except ValueError:
        raise row.error(key, given, "write a digest in hexadecimal") from None
