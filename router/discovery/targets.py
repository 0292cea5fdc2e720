"""What a source says of a replica, and one fleet made of what several sources say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Target:
    """A replica as a source tells it. `id` and `url` are in the form that settings have them in."""

    id: str
    url: str
    weight: float = 1.0
    uid: str = ""
    """Of what stands behind the URL, such as a pod; another one is another replica. Empty where there is none."""
    drains: str = ""
    """Why it is to be emptied; empty when it is not."""
    serving: bool = True
    """Whether it takes requests. One that drains and does not is not worth joining, but no reason to leave."""

    def same_as(self, other: Target) -> bool:
        """Whether both are one replica, whatever else is told of it."""
        return self.id == other.id and self.url == other.url and (self.uid == other.uid or not (self.uid and other.uid))


@dataclass(frozen=True, slots=True)
class Given:
    """A replica of the fleet, and the source that gave it."""

    target: Target
    source: str


def union(told: Mapping[str, Iterable[Target]]) -> tuple[dict[str, Given], list[str]]:
    """One fleet by id, and a sentence for each target that was left out for an earlier one.

    Sources are heard in their order: which came first is the same on all routers, and after a restart. A URL is one
    replica, and an id is one.
    """
    fleet: dict[str, Given] = {}
    by_url: dict[str, Given] = {}
    left_out = []
    for source, targets in told.items():
        for target in targets:
            if (holder := by_url.get(target.url)) is not None:
                if holder.source != source or holder.target.id != target.id:
                    left_out.append(
                        f"{source} tells {target.url} as {target.id}, which {holder.source} tells as "
                        f"{holder.target.id}: it is one replica, and called so"
                    )
            elif (holder := fleet.get(target.id)) is not None:
                left_out.append(
                    f"{source} tells {target.id} at {target.url}, but {holder.source} tells one of that id at "
                    f"{holder.target.url}: the first is used, the other is not"
                )
            else:
                fleet[target.id] = by_url[target.url] = Given(target, source)
    return fleet, left_out
