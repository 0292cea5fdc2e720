"""How many routers stand before a fleet, and what they tell each other."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

LEAST_PUBLISH_S = 0.01
"""With much less, a run would never end."""


class Spread(StrEnum):
    """How requests come to the routers."""

    RANDOM = "random"
    BY_SESSION = "by_session"
    """A balancer in front hashes the session."""


class Sharing(StrEnum):
    """What routers tell each other."""

    DIRECTORY = "directory"
    """Homes, and how much they have under way."""
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Routers:
    """How many, and what they share. Raises ValueError when it cannot be."""

    count: int = 1
    spread: Spread = Spread.RANDOM
    sharing: Sharing = Sharing.DIRECTORY
    share_delay_s: float = 0.05
    """From what a router does until the others know."""
    publish_s: float = 0.05
    """Between two messages of a router's load, when it has changed."""

    def __post_init__(self) -> None:
        if not 1 <= self.count <= 1000:
            raise ValueError(f"routers: count must be from 1 to 1000, got {self.count}")
        if not self.share_delay_s >= 0:
            raise ValueError(f"routers: share_delay_s must be 0 or more, got {self.share_delay_s}")
        if not self.publish_s >= LEAST_PUBLISH_S:
            raise ValueError(f"routers: publish_s must be {LEAST_PUBLISH_S} or more, got {self.publish_s}")


ONE = Routers()
