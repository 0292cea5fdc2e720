"""All replicas of a world, and what happens to them."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from policies.types import State
from sim.client import Call
from sim.engine import Engine
from sim.fleet import PICKED, Fleet, Group, Role
from sim.front import Front
from sim.measure import Measure
from sim.reports import Reports
from sim.server import Observer, Server


class Servers:
    """They come and go, die and come back; the routers are told of those that they choose among."""

    def __init__(
        self,
        fleet: Fleet,
        engine: Engine,
        front: Front,
        measure: Measure,
        random: Random,
        observer: Observer,
        lost: Callable[[Call, Server], None],
    ) -> None:
        """`observer` is told of every request's stages, `lost` of each call whose replica died."""
        self.fleet = fleet
        self.all: list[Server] = []
        """Whatever their role."""
        self.joined_at: list[float] = []
        """When replicas were added to those of the start, seconds."""
        self._engine = engine
        self._front = front
        self._measure = measure
        self._observer = observer
        self._lost = lost
        self._reports = Reports(engine, front, random, fleet.report_interval_s, fleet.report_delay_s)
        self._made = 0
        for group in fleet.groups:
            for _ in range(group.count):
                self._add(group)

    def picked(self) -> list[Server]:
        """Those that routers choose among, whatever their state."""
        return [server for server in self.all if server.group.role in PICKED]

    def least(self, role: Role) -> Server | None:
        """Of those of a role, the one with the fewest tokens of prompts."""
        serving = [server for server in self.all if server.group.role is role and server.serves]
        return min(serving, key=lambda server: server.tokens, default=None)

    def _of(self, group: str | None) -> list[Server]:
        """Those of a group that serve."""
        wanted = self.fleet.group(group)
        return [server for server in self.all if server.group is wanted and server.serves]

    def _add(self, group: Group) -> None:
        server = Server(self._made, group, self._engine, self._observer)
        self._made += 1
        self.all.append(server)
        if group.role in PICKED:
            self._measure.placed[server.id] = 0
            self._front.join(server)
            self._reports.watch(server)

    def scale_out(self, count: int, group: str | None) -> None:
        """So many new, empty replicas join, of the first group unless another is named."""
        self.joined_at.append(self._engine.now)
        for _ in range(count):
            self._add(self.fleet.group(group))

    def scale_in(self, count: int, group: str | None) -> None:
        """The oldest replicas of a group are drained and leave when they are empty."""
        for server in self._of(group)[:count]:
            server.leaving = True
            if server.group.role in PICKED:
                self._front.set_state(server, State.DRAINING)
            self.released(server)

    def released(self, server: Server) -> None:
        """A call has given back its place on it: if that was the last one of a replica that leaves, it is gone."""
        if server.leaving and not server.engaged and server in self.all:
            self.all.remove(server)
            if server.group.role in PICKED:
                self._front.leave(server)
                self._reports.forget(server)

    def crash(self, down_s: float, group: str | None) -> None:
        """The first replica of a group dies, and is back, empty, after a time. Nothing when the group has none."""
        serving = self._of(group)
        if not serving:
            return
        server = serving[0]
        server.up = False
        server.boot()
        if server.group.role in PICKED:
            self._front.set_state(server, State.EJECTED)
        calls, server.calls = server.calls, {}
        for call in calls.values():
            self._lost(call, server)
        self._engine.after(down_s, self._back, server)

    def _back(self, server: Server) -> None:
        server.up = True
        if server.group.role in PICKED:
            self._front.cache_cleared(server)
            self._front.set_state(server, State.READY)

    def slow_down(self, factor: float, group: str | None) -> None:
        """The last replica of a group takes `factor` times as long for everything from now on. Nothing when the group
        has none."""
        for server in self._of(group)[-1:]:
            server.replica.hardware = server.group.hardware.slowed(factor)
