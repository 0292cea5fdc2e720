"""Every family of ours, in one table: what is exposed is read through it, and the operations page is written from it.

To add one: a row in the module it belongs to, and a line that counts. `python -m router.metrics` prints the table as it
must stand under "Metrics" in docs/operations.md; a test compares both.
"""

from __future__ import annotations

from collections.abc import Iterator

from router.metrics import admission, discovery, placement, process, replicas, requests, store
from router.metrics.family import Label

FAMILIES = (
    *requests.ROWS,
    *admission.ROWS,
    *placement.ROWS,
    *replicas.ROWS,
    *discovery.ROWS,
    *store.ROWS,
    *process.ROWS,
)


def markdown() -> Iterator[str]:
    """Lines of the table of metrics, and of that of labels."""
    yield "| name | type | unit | labels | workers | meaning |"
    yield "|---|---|---|---|---|---|"
    seen: dict[str, list[Label]] = {}
    for family in FAMILIES:
        names = ", ".join(label.name for label in family.labels)
        told = f"{family.kind} | {family.unit} | {names} | {family.merge} | {_sentence(family.meaning)}"
        yield f"| `{family.name}` | {told} |"
        for label in family.labels:
            known = seen.setdefault(label.name, [])
            if label not in known:
                known.append(label)
    yield ""
    yield "| label | meaning | values |"
    yield "|---|---|---|"
    for name, found in seen.items():
        for label in found:
            short = label.values is not None and len(label.values) < 10
            values = ", ".join(f"`{value}`" for value in label.values or ()) if short else ""
            yield f"| `{name}` | {label.meaning} | {values} |"


def _sentence(meaning: str) -> str:
    """As cells are written: without a full stop at the end, and a small letter at the start."""
    text = meaning.rstrip(".")
    return text if text.startswith("KV") else text[0].lower() + text[1:]
