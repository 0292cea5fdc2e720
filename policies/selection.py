"""Some of the replicas, as places of the vectors over all: among whom a request's place is sought."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from policies.field import Field, Vector
from policies.types import Replica


class Selection:
    """Candidates, and what follows from which they are. Made anew when the set of them changes, or one's weight."""

    __slots__ = ("barred", "candidates", "elder", "field", "shut", "youngest")

    def __init__(self, field: Field, candidates: Sequence[Replica]) -> None:
        """Each candidate must have a place."""
        self.field = field
        self.candidates = candidates
        places = np.fromiter(map(field.place, candidates), np.intp, len(candidates))
        started = field.started[places]
        self.youngest = float(started.max())
        """When the last of them was started."""
        self.elder = float(np.sort(started)[(len(candidates) - 1) // 2])
        """When half of them were."""
        weightless = field.weight[places] <= 0.0
        self.barred = bool(weightless.any() and not weightless.all())
        """Whether some may get no new sessions: those without weight, unless none has any."""
        self.shut: Vector = np.full(len(field.replicas), np.inf)
        """What is to be added to the cost of each place: infinite for those that get no new session, of no candidates
        and of those that may get none; else 0."""
        self.shut[places[~weightless] if self.barred else places] = 0.0

    def least(self, costs: Vector) -> int:
        """The place of least cost; among equals, the candidate's that comes first in order of id."""
        least = int(costs.argmin())
        equals: list[int] = (costs == costs[least]).nonzero()[0].tolist()
        if len(equals) == 1:
            return least
        return min(equals, key=lambda place: self.field.replica(place).id)
