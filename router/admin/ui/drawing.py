"""Small drawings, as the numbers that SVG wants."""

from __future__ import annotations

from collections.abc import Sequence

WIDTH, HEIGHT = 120, 24


def spark(values: Sequence[float]) -> str:
    """A line through the values, the last at the right edge, as the points of a polyline in WIDTH by HEIGHT."""
    top = max(values, default=0.0) or 1.0
    step, scale = WIDTH / max(1, len(values) - 1), (HEIGHT - 2) / top
    return " ".join(f"{number * step:.1f},{HEIGHT - 1 - value * scale:.1f}" for number, value in enumerate(values))
