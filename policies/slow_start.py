"""What keeps a crowd of new sessions off a replica that has just joined or come back."""

from __future__ import annotations

import numpy as np

from policies.field import Field, Vector

START_S = 60.0
"""Price of a new placement on a replica that starts and has enough to do: others are preferred unless they are as far
behind."""

GROWN = 7
"""Prompts, beyond the first, that may wait for their first token there at the end of the slow start."""


def some_start(field: Field, slow_start_s: float, now: float) -> bool:
    """Whether some of the candidates start, and not most of them: then nobody else would be there to send to."""
    return field.elder <= now - slow_start_s < field.youngest


def extra_s(field: Field, slow_start_s: float, now: float) -> Vector:
    """Seconds to be added to the cost of a new placement on each candidate.

    A replica may have one prompt waiting for its first token at first, and more as it grows older: its first answers,
    for which kernels may be compiled and everything is cold, are not waited for by many; one prompt at a time keeps it
    busy all the same, as prefills are served one after the other.
    """
    extra: Vector = np.zeros(len(field.candidates))
    if some_start(field, slow_start_s, now):
        ages = now - field.started
        for i in np.flatnonzero(ages < slow_start_s).tolist():
            if field.candidates[i].pending > GROWN * ages[i] / slow_start_s:
                extra[i] = START_S
    return extra
