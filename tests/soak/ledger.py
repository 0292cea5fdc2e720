"""What happened: requests by how they ended, faults and when, and whatever no fault explains."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

BEFORE_S = 4.0
"""A fault explains what breaks so long after it is over: probes and retries need a moment to see it."""
AFTER_S = 1.0
"""And so long before it is said to begin: a signal is noted before it is sent, but not before every answer is read."""
MAX_VIOLATIONS = 50


@dataclass(slots=True)
class Fault:
    """Something done to a replica."""

    replica: str
    """Its id, the URL; empty for all."""
    what: str
    began: float
    ended: float | None = None


@dataclass(slots=True)
class Ledger:
    """Kept by traffic, churn and watch alike."""

    clock: float = field(default_factory=time.monotonic)
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[Fault] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    outstanding: int = 0
    """Requests that clients wait for at the moment."""

    def now(self) -> float:
        """Seconds since the soak began."""
        return time.monotonic() - self.clock

    def begin(self, replica: str, what: str) -> Fault:
        """A fault is about to be done to a replica."""
        fault = Fault(replica, what, self.now())
        self.faults.append(fault)
        self.counts[f"fault {what}"] += 1
        return fault

    def end(self, fault: Fault) -> None:
        """The replica is well again."""
        fault.ended = self.now()

    def explained(self, replica: str | None, began: float) -> bool:
        """Whether a fault of that replica (of any, when None) falls into the time of a request begun at `began`."""
        now = self.now()
        for fault in reversed(self.faults):
            ended = now if fault.ended is None else fault.ended
            if ended + BEFORE_S < began and fault.ended is not None:
                continue
            if fault.began <= now + AFTER_S and (replica is None or fault.replica == replica):
                return True
        return False

    def violate(self, what: str) -> None:
        """Something that nothing explains."""
        self.counts["violations"] += 1
        if len(self.violations) < MAX_VIOLATIONS:
            self.violations.append(f"{self.now():.1f} s: {what}")
            print(f"VIOLATION {self.violations[-1]}", flush=True)
