"""Faults that a tester can switch on."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(slots=True)
class Faults:
    """Current faults of one replica; the defaults are none."""

    ready: bool = True
    """False: /ready and /health answer 503, everything else works, as during start-up."""
    queue_full: bool = False
    """Every inference request is refused as if the waiting queue were full."""
    die_mid_stream_after: int | None = None
    """Each stream is cut after so many events, without its end, as when the scheduler has crashed."""
    status: int | None = None
    """Every inference request is answered with this status at once."""
    hang: bool = False
    """The scheduler stands still: no tokens, stale loads, and /health fails after its 20 s."""

    def update(self, changes: dict[str, Any]) -> None:
        """Sets the named faults; ValueError names a key or value that cannot be, and nothing is changed."""
        known = {item.name for item in fields(self)}
        for key, value in changes.items():
            if key not in known:
                raise ValueError(f"unknown fault {key!r}; known: {', '.join(sorted(known))}")
            if key in ("ready", "queue_full", "hang"):
                if not isinstance(value, bool):
                    raise ValueError(f"{key} must be true or false, not {value!r}")
            elif value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
                raise ValueError(f"{key} must be null or a number from 0, not {value!r}")
            elif key == "status" and value is not None and not 200 <= value <= 599:
                raise ValueError(f"status must be between 200 and 599, not {value}")
        for key, value in changes.items():
            setattr(self, key, value)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
