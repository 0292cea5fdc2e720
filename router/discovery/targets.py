"""What a source says of a replica, and one fleet made of what several sources say."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from router.ranks import ids

if TYPE_CHECKING:
    from router.settings import ReplicaSettings


@dataclass(frozen=True, slots=True)
class Target:
    """A replica as a source tells it: an engine, or one of its ranks. `id` and `url` are in the form of settings."""

    id: str
    url: str
    weight: float = 1.0
    uid: str = ""
    """Of what stands behind the URL, such as a pod; another one is another replica. Empty where there is none."""
    drains: str = ""
    """Why it is to be emptied; empty when it is not."""
    serving: bool = True
    """Whether it takes requests. One that drains and does not is not worth joining, but no reason to leave."""
    rank: int | None = None
    """Of the engine's data-parallel ranks the one that it is; None when it is the whole engine."""
    ranks: int = 1
    """How many the engine is said to have."""
    pool: str = ""
    """Whose it is, as its source calls it; empty for the default one."""

    def same_as(self, other: Target) -> bool:
        """Whether both are one replica, whatever else is told of it. In another pool it is another."""
        placed = (self.id, self.url, self.rank, self.pool)
        there = (other.id, other.url, other.rank, other.pool)
        return placed == there and (self.uid == other.uid or not (self.uid and other.uid))


@dataclass(frozen=True, slots=True)
class Given:
    """A replica of the fleet, and the source that gave it."""

    target: Target
    source: str


def in_ranks(target: Target, ranks: int) -> Iterator[Target]:
    """A whole engine as the replicas that it is: one, or one for each of several ranks."""
    if ranks == 1:
        yield target
        return
    for rank, id in enumerate(ids(target.id, ranks)):
        yield replace(target, id=id, rank=rank, ranks=ranks)


def shared(found: Iterable[Target], weight: float, ranks: int, pool: str) -> list[Target]:
    """What a source found, with the share, in the ranks and in the pool that it gives all of its own."""
    return [each for target in found for each in in_ranks(replace(target, weight=weight, pool=pool), ranks)]


def listed(replicas: Iterable[ReplicaSettings]) -> list[Target]:
    """Those of a list as settings and files have it."""
    found = ((Target(given.id, given.url, given.weight, pool=given.pool), given.ranks) for given in replicas)
    return [each for target, ranks in found for each in in_ranks(target, ranks)]


def union(told: Mapping[str, Iterable[Target]]) -> tuple[dict[str, Given], list[str]]:
    """One fleet by id, and a sentence for each target that was left out for an earlier one.

    Sources are heard in their order: which came first is the same on all routers, and after a restart. A URL, or one
    rank of it, is one replica, and an id is one. How many ranks a URL has is for one to say.
    """
    fleet: dict[str, Given] = {}
    by_url: dict[str, dict[int | None, Given]] = {}
    left_out: dict[str, None] = {}  # of several ranks many sentences are the same
    for source, targets in told.items():
        for target in targets:
            there = by_url.get(target.url, {})
            if there and (first := next(iter(there.values()))).target.ranks != target.ranks:
                left_out[
                    f"{source} tells {target.url} {_extent(target)}, but {first.source} tells it "
                    f"{_extent(first.target)}: the first is used, the other is not; set the same ranks in both"
                ] = None
            elif (holder := there.get(target.rank)) is not None:
                if holder.source != source or holder.target.id != target.id:
                    left_out[
                        f"{source} tells {target.url} as {target.id}, which {holder.source} tells as "
                        f"{holder.target.id}: it is one replica, and called so"
                    ] = None
            elif (holder := fleet.get(target.id)) is not None:
                left_out[
                    f"{source} tells {target.id} at {target.url}, but {holder.source} tells one of that id at "
                    f"{holder.target.url}: the first is used, the other is not"
                ] = None
            else:
                fleet[target.id] = by_url.setdefault(target.url, {})[target.rank] = Given(target, source)
    return fleet, list(left_out)


def _extent(target: Target) -> str:
    return "whole" if target.rank is None else f"in {target.ranks} ranks"
