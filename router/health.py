"""Whether replicas are well: probes, what the data path sees, and the panic rule over all of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from policies.balancer import Balancer
from policies.types import Replica, State
from router.ask import Asker
from router.breaker import Breaker
from router.probes import Probes
from router.settings import HealthSettings
from router.standing import Standing
from router.units import counted

log = logging.getLogger("warmroute.health")

_FAULTS = frozenset({500, 502, 504})
"""Answers that speak against a replica: its own failure, or that of what stands before it. 503 says that it is busy,
and every other one something of the request."""


class Health:
    """Watches every replica that joins until it leaves. Tells the Balancer of each change of state.

    The panic rule: when of a pool's replicas that do not drain fewer than `panic_share` are well, it is likelier that
    the signal is wrong than that they all are, and those that are well could not carry all the load. Then the others
    are used, too, as Envoy does at the same share; but not those that refuse connections, whose name does not exist or
    that generated nothing when asked to, since requests would fare no better, and those that answer no probe only when
    there is nothing else.
    """

    def __init__(self, balancer: Balancer, settings: HealthSettings, clock: Callable[[], float]) -> None:
        self._balancer = balancer
        self._settings = settings
        self._clock = clock
        self._watches: dict[Replica, _Watch] = {}
        self.panic = False
        """Whether the panic rule is in force in any pool."""
        self._panicking: set[str] = set()
        """In which."""
        self.well = self.counted = 0
        """Replicas that are well, of those that do not drain: of the pools in panic, of all when none is."""
        self.doubted = 0
        """Replicas that are used by the panic rule although they are not."""

    def watch(self, replica: Replica, asker: Asker) -> None:
        """Begin to probe it."""
        self._watches[replica] = _Watch(self, replica, asker, self._settings, self._clock)
        if self.panic:  # one more, which begins as ready, can only end it
            self._assess()

    async def forget(self, replica: Replica) -> None:
        """Stop probing it."""
        if (watch := self._watches.pop(replica, None)) is not None:
            await watch.probes.stop()
            self._assess()

    def configure(self, settings: HealthSettings) -> None:
        """From now on by these settings; what was seen until now stands."""
        self._settings = settings
        for watch in self._watches.values():
            watch.configure(settings)
        self._assess()

    @property
    def probed(self) -> bool:
        """Whether every replica has been probed at least once."""
        return all(watch.probes.probed for watch in self._watches.values())

    def why(self, replica: Replica) -> str:
        """Why it is in the state it is in."""
        watch = self._watches.get(replica)
        return watch.why if watch is not None else "not watched"

    def doubt(self, replica: Replica) -> State | None:
        """The state that the panic rule doubts, using the replica all the same; None when it does not."""
        watch = self._watches.get(replica)
        return watch.doubt if watch is not None else None

    def since(self, replica: Replica) -> float | None:
        """When it came into that state, seconds since the epoch; None when it is not watched."""
        watch = self._watches.get(replica)
        return watch.since if watch is not None else None

    def breaker(self, replica: Replica) -> Breaker | None:
        """Its circuit breaker; None when it is not watched."""
        watch = self._watches.get(replica)
        return watch.standing.breaker if watch is not None else None

    def order(self, replica: Replica, state: State | None, why: str = "") -> None:
        """An operator's drain: DRAINING or FINISHING whatever the probes say, unless it is ejected; None ends it.

        Raises KeyError when it is not watched.
        """
        watch = self._watches[replica]
        watch.ordered, watch.order = state, why
        self._assess()

    # Told by the data path

    def succeeded(self, replica: Replica) -> None:
        """It began to answer a request."""
        if (watch := self._watches.get(replica)) is not None:
            watch.standing.request_succeeded()

    def answered(self, replica: Replica, status: int) -> None:
        """It answered a request to the end."""
        if (watch := self._watches.get(replica)) is None:
            return
        standing = watch.standing
        if status in _FAULTS:
            standing.request_failed(f"a {status}", self._clock(), answered=True)
            self.settle(watch)
        elif status != 503:
            standing.request_answered(now := self._clock())
            if standing.state is not watch.known[0]:
                self.settle(watch, now)

    def failed(self, replica: Replica, why: str) -> None:
        """It left a request unanswered, or broke off."""
        if (watch := self._watches.get(replica)) is not None:
            watch.standing.request_failed(why, self._clock())
            self.settle(watch)

    def gone(self, replica: Replica) -> bool:
        """Whether it is out because not even its probes are answered: what waits there waits in vain."""
        watch = self._watches.get(replica)
        return watch is not None and watch.standing.silent and replica.state is State.EJECTED

    # States

    def settle(self, watch: _Watch, now: float | None = None) -> None:
        """Carry a change of standing over to the Balancer."""
        standing = watch.standing
        standing.tick(self._clock() if now is None else now)
        self._note_slowness(watch)
        known = (standing.state, standing.dead, standing.mute)
        if known != watch.known:
            watch.known = known
            self._assess()

    def _note_slowness(self, watch: _Watch) -> None:
        """One line when it becomes slow, and one when it is not any more."""
        slowness = watch.replica.speed.slowness
        slow, watch.slow = watch.slow, slowness > 1.0
        if watch.slow and not slow:
            log.warning(
                "replica %s is slow: its first tokens take %.1f times what is expected, compared with the fleet's",
                watch.replica.id,
                slowness,
            )
        elif slow and not watch.slow:
            log.info("replica %s is not slow any more", watch.replica.id)

    def _assess(self) -> None:
        """The state of each, in the light of all of its pool."""
        pools: dict[str, list[_Watch]] = {}
        for watch in self._watches.values():
            pools.setdefault(watch.replica.pool, []).append(watch)
        looks = {pool: _Look(watches, self._settings.panic_share) for pool, watches in pools.items()}
        panicking = {pool: look for pool, look in looks.items() if look.panic}
        told = (panicking or looks).values()
        self.well = sum(len(look.well) for look in told)
        self.counted = sum(len(look.used) for look in told)
        self.doubted = sum(len(look.doubtful) for look in told)
        self.panic = bool(panicking)
        for pool in panicking.keys() - self._panicking:
            log.warning(
                "panic: %s, fewer than health.panic_share %g: others are used, too, unless they are dead",
                looks[pool],
                self._settings.panic_share,
            )
        for pool in self._panicking - panicking.keys():
            if pool in looks and looks[pool].used:
                log.info("no panic any more: %s", looks[pool])
        self._panicking = set(panicking)
        for look in looks.values():
            for watch in look.watches:
                self._carry_over(watch, watch in look.doubtful)

    def _carry_over(self, watch: _Watch, doubted: bool) -> None:
        """What its standing, an operator and the panic rule make of it."""
        standing = watch.standing
        watch.doubt = standing.state if doubted else None
        if watch.doubt is not None:
            self._set(watch, State.READY, f"panic: used although {standing.state}: {standing.why}")
        elif watch.ordered is not None and standing.state in (State.READY, State.HALF_OPEN):
            self._set(watch, watch.ordered, watch.order)
        else:
            self._set(watch, standing.state, "")

    def _set(self, watch: _Watch, state: State, override: str) -> None:
        watch.override = override
        replica = watch.replica
        if replica.state is not state:
            level = logging.INFO if state is State.READY and not override else logging.WARNING
            log.log(level, "replica %s is %s (was %s): %s", replica.id, state, replica.state, watch.why)
            watch.since = time.time()
            self._balancer.set_state(replica, state, self._clock())


class _Look:
    """At the replicas of one pool: how many are well, and which others the panic rule uses."""

    def __init__(self, watches: list[_Watch], panic_share: float) -> None:
        self.watches = watches
        self.used = [w for w in watches if w.ordered is None and w.standing.state is not State.DRAINING]
        self.well = [w for w in self.used if w.standing.state is State.READY]
        self.panic = len(self.well) < panic_share * len(self.used)
        self.doubtful: set[_Watch] = set()
        if self.panic:
            alive = [w for w in self.used if w.standing.state is not State.READY and not w.standing.dead]
            self.doubtful = {w for w in alive if not w.standing.mute}
            if not self.doubtful and not self.well:
                self.doubtful = set(alive)

    def __str__(self) -> str:
        pool = self.watches[0].replica.pool
        of = f" of pool {pool}" if pool else ""
        return f"{len(self.well)} well of {counted(len(self.used), 'replica')}{of}, draining ones aside"


class _Watch:
    """What is known of one replica, and ordered."""

    def __init__(
        self, health: Health, replica: Replica, asker: Asker, settings: HealthSettings, clock: Callable[[], float]
    ) -> None:
        self.replica = replica
        self.standing = Standing(settings)
        self.known = (self.standing.state, self.standing.dead, self.standing.mute)
        """What the states of all were last made of."""
        self.slow = False
        """Whether it was when last looked at."""
        self.ordered: State | None = None
        """What an operator ordered."""
        self.order = ""
        """Why."""
        self.doubt: State | None = None
        """Its standing's state, when the panic rule uses it all the same."""
        self.override = ""
        """Why it is in another state than its standing's."""
        self.since = time.time()
        """When it came into its state, seconds since the epoch."""
        self.probes = Probes(replica, self.standing, asker, settings, clock, lambda: health.settle(self))

    @property
    def why(self) -> str:
        return self.override or self.standing.why

    def configure(self, settings: HealthSettings) -> None:
        self.standing.configure(settings)
        self.probes.configure(settings)
