"""What keeps a crowd of new sessions off a replica that has just joined or come back."""

from __future__ import annotations

import numpy as np

from policies.field import Vector
from policies.selection import Selection

START_S = 60.0
"""Price of a new placement on a replica that starts and has enough to do: others are preferred unless they are as far
behind."""

GROWN = 7
"""Prompts, beyond the first, that may wait for their first token there at the end of the slow start."""


def some_start(selection: Selection, slow_start_s: float, now: float) -> bool:
    """Whether some of the candidates start, and not most of them: then nobody else would be there to send to."""
    return selection.elder <= now - slow_start_s < selection.youngest


def extra_s(selection: Selection, slow_start_s: float, now: float) -> Vector:
    """Seconds to be added to the cost of a new placement on each place, of no meaning where no candidate is.

    A replica may have one prompt waiting for its first token at first, and more as it grows older: its first answers,
    for which kernels may be compiled and everything is cold, are not waited for by many; one prompt at a time keeps it
    busy all the same, as prefills are served one after the other.
    """
    field = selection.field
    extra: Vector = np.zeros(len(field.replicas))
    if some_start(selection, slow_start_s, now):
        ages = now - field.started
        for i in np.flatnonzero(ages < slow_start_s).tolist():
            replica = field.replicas[i]
            if replica is not None and replica.pending > GROWN * ages[i] / slow_start_s:
                extra[i] = START_S
    return extra
