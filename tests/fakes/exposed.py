"""What a router exposes for Prometheus, read in short."""

from __future__ import annotations

import re


def total(text: str, name: str) -> float:
    """The sum over all labels of a metric, or of those series that a name with labels tells; 0 when there is none."""
    return sum(map(float, re.findall(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? (\S+)$", text, re.M)))
