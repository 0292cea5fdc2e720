"""`/replicas`: the fleet as it stands."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from policies import cost
from policies.speed import Speed
from policies.types import Replica, State
from router.admin.answers import Refused, json_of, no_such_replica, wall_clock, who
from router.breaker import Circuit
from router.drains import Homes
from router.proxy.upstream import Upstream

if TYPE_CHECKING:
    from router.app import Router


_EXAMPLE = '{"homes": "finish"}'


class Replicas:
    """The replicas of one router."""

    def __init__(self, router: Router) -> None:
        self._router = router

    def routes(self) -> list[Route]:
        return [
            Route("/replicas", self.replicas),
            Route("/replicas/{id:path}/drain", self.drain, methods=["POST", "DELETE"]),
        ]

    async def replicas(self, _: Request) -> Response:
        replicas = self._router.balancer.replicas
        leaving = [{"id": r.id, "url": _url(r), "in_flight": r.in_flight} for r in self._router.fleet.leaving]
        described = [self.describe(replicas[name]) for name in sorted(replicas)]
        return JSONResponse({"replicas": described, "leaving": leaving, "panic": self._router.health.panic})

    async def drain(self, request: Request) -> Response:
        """POST empties a replica, DELETE takes that back. The id may stand as it is or percent-encoded."""
        replica_id, router = request.path_params["id"], self._router
        homes = Homes.MOVE if request.method == "DELETE" else _homes(await json_of(request, _EXAMPLE, {}))
        if replica_id not in router.balancer.replicas:
            raise no_such_replica(replica_id, router.balancer.replicas)
        if request.method == "DELETE":
            replica = router.orders.undrain(replica_id, who(request))
        else:
            replica = router.orders.drain(replica_id, homes, who(request))
        return JSONResponse(self.describe(replica))

    def _breaker(self, replica: Replica, now: float) -> dict[str, Any] | None:
        """Whether its requests fail, why it opened last, and when it tries again."""
        breaker = self._router.health.breaker(replica)
        if breaker is None:
            return None
        wait_s = breaker.retry_at - now if breaker.state is Circuit.OPEN else None
        return {
            "state": breaker.state,
            "why": breaker.why or None,
            "trips": breaker.trips,
            "retry_in_s": None if wait_s is None else round(max(0.0, wait_s), 1),
        }

    def describe(self, replica: Replica) -> dict[str, Any]:
        """One replica, fit for JSON."""
        now = self._router.clock()
        load = None
        if replica.load is not None:
            load = asdict(replica.load)
            load["age_s"] = round(now - load.pop("at"), 3)
        return {
            "id": replica.id,
            "url": _url(replica),
            "rank": _rank(replica),
            "pool": self._router.fleet.pools.shown(replica.pool) or None,
            "source": None if (given := self._router.fleet.given.get(replica.id)) is None else given.source,
            "state": replica.state,
            "why": self._router.health.why(replica),
            "since": wall_clock(self._router.health.since(replica)),
            "drain": self._progress(replica, now),
            "weight": replica.weight,
            "in_flight": replica.in_flight,
            "served": replica.served,
            "pending_prefill_tokens": replica.prefill_tokens,
            "others_in_flight": cost.requests(replica, now) - replica.in_flight,
            "expected_wait_s": round(cost.expected_wait(replica, now), 4),
            "cache_since_s": round(now - replica.since, 1),
            "running_tokens": replica.held_tokens,
            "resident_tokens": replica.cache.held_tokens,
            "capacity_tokens": int(replica.cache.capacity),
            "live_tokens": int(replica.cache.live(now)),
            "breaker": self._breaker(replica, now),
            "slowness": round(replica.speed.slowness, 3),
            "speed": _speed(replica.speed),
            "load": load,
        }

    def _progress(self, replica: Replica, now: float) -> dict[str, Any] | None:
        """How far a drain is, an operator's, its source's or the replica's own; None when there is none."""
        drain = self._router.fleet.drains.get(replica)
        found = self._router.fleet.why_drained(replica)
        if drain is None and not found and replica.state is not State.DRAINING:
            return None
        own = Homes.FINISH if found and replica.state is not State.DRAINING else Homes.MOVE
        homes = own if drain is None else drain.homes
        since = self._router.health.since(replica) if drain is None else drain.since
        conversations = replica.cache.homes_since(now - self._router.settings.drain.session_idle_s)
        return {
            "by": drain.who if drain is not None else found if own is Homes.FINISH else "the replica",
            "homes": homes,
            "since": wall_clock(since),
            "in_flight": replica.in_flight,
            "conversations": conversations,
            "done": not replica.in_flight and (homes is Homes.MOVE or not conversations),
        }


def _homes(given: Any) -> Homes:
    """What `{"homes": ...}` says, by default that they move. Raises Refused."""
    if not isinstance(given, dict):
        raise Refused(422, "invalid_drain", f"Nothing was changed: write it as in {_EXAMPLE}.")
    if unknown := sorted(set(given) - {"homes"}):
        raise Refused(422, "invalid_drain", f"Nothing was changed: unknown key {unknown[0]!r}; known keys: homes.")
    homes = given.get("homes", Homes.MOVE)
    if homes not in list(Homes):
        told = f"homes must be one of {', '.join(Homes)}, got {homes!r}"
        raise Refused(422, "invalid_drain", f"Nothing was changed: {told}.")
    return Homes(homes)


def _url(replica: Replica) -> str | None:
    return replica.address.url if isinstance(replica.address, Upstream) else None


def _rank(replica: Replica) -> int | None:
    return replica.address.rank if isinstance(replica.address, Upstream) else None


def _speed(speed: Speed) -> dict[str, Any]:
    step_s, slope_s, stall = speed.decode
    return {
        "prefill_factor": round(speed.factor, 4),
        "step_ms": round(step_s * 1000, 3),
        "slope_ms": round(slope_s * 1000, 4),
        "stall": round(stall, 3),
        "answer_s": round(speed.answer_s, 2),
        "observations": {"prefills": speed.prefills, "decodes": speed.decodes, "answers": speed.answers},
    }
