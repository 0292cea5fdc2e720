"""What happens to a fleet in a scenario."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from sim.world import World

MOST_S = 2e7
"""Of a run: 231 days. All sessions of one that is a thousand times as long would not fit into memory."""

Seconds = Annotated[float, Field(ge=0.0, le=MOST_S)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]


@dataclass(frozen=True, slots=True)
class ScaleOut:
    """New, empty replicas join a group, as a share of what it had at the start."""

    at_s: Seconds
    share: Share
    group: str | None = None
    """None: the first."""
    kind: Literal["scale_out"] = "scale_out"

    def apply(self, world: World) -> None:
        world.scale_out(round(self.share * world.fleet.group(self.group).count), self.group)


@dataclass(frozen=True, slots=True)
class ScaleIn:
    """The oldest replicas of a group are drained and leave, as a share of what it had at the start."""

    at_s: Seconds
    share: Share
    group: str | None = None
    kind: Literal["scale_in"] = "scale_in"

    def apply(self, world: World) -> None:
        world.scale_in(round(self.share * world.fleet.group(self.group).count), self.group)


@dataclass(frozen=True, slots=True)
class Crash:
    """The first replica of a group dies, and is back, empty, after a time."""

    at_s: Seconds
    down_s: Seconds = 60.0
    group: str | None = None
    kind: Literal["crash"] = "crash"

    def apply(self, world: World) -> None:
        world.crash(self.down_s, self.group)


@dataclass(frozen=True, slots=True)
class SlowReplica:
    """The last replica of a group takes `factor` times as long for everything from then on."""

    at_s: Seconds
    factor: Annotated[float, Field(gt=0.0)]
    group: str | None = None
    kind: Literal["slow_replica"] = "slow_replica"

    def apply(self, world: World) -> None:
        world.slow_down(self.factor, self.group)


@dataclass(frozen=True, slots=True)
class RestartRouter:
    """A new router takes over that knows nothing but what is stored."""

    at_s: Seconds
    index: Annotated[int, Field(ge=0)] | None = None
    """Which of several; None: all of them."""
    kind: Literal["restart_router"] = "restart_router"

    def apply(self, world: World) -> None:
        world.restart_router(self.index)


@dataclass(frozen=True, slots=True)
class StoreLost:
    """What several routers share is lost, and with it all homes."""

    at_s: Seconds
    kind: Literal["store_lost"] = "store_lost"

    def apply(self, world: World) -> None:
        world.lose_store()


@dataclass(frozen=True, slots=True)
class SwitchPolicy:
    """Another policy takes over from the next request on."""

    at_s: Seconds
    policy: str
    parameters: Mapping[str, object] = field(default_factory=dict)
    kind: Literal["switch_policy"] = "switch_policy"

    def apply(self, world: World) -> None:
        world.switch(self.policy, self.parameters)


Event = ScaleOut | ScaleIn | Crash | SlowReplica | RestartRouter | StoreLost | SwitchPolicy
