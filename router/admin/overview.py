"""`/overview`: the whole router in one answer, for those who watch it: the page and `warmroute top`."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from math import inf
from typing import TYPE_CHECKING, Any

from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from policies import cost
from policies.types import Reason, Replica, State
from router import explanation
from router.admin.answers import Refused, number_of, wall_clock
from router.admin.discovery import found
from router.admin.replicas import Replicas
from router.admin.store import shared
from router.decisions import Decision
from router.standing import PLAINLY_READY
from router.switching import described
from router.units import counted
from router.version import VERSION

if TYPE_CHECKING:
    from router.app import Router
    from router.health import Health

PER_PAGE = 100
"""Replicas described at once: describing one costs some 20 us, and the event loop waits for it."""

SHOWN_DECISIONS = 40

STATES = {state: state.value for state in State} | {State.HALF_OPEN: "on trial"}
"""As people read them."""

_DIGITS = re.compile(r"(\d+)")

LEVELS = {State.READY: "ok", State.EJECTED: "bad"}
"""How bad a state is; every other one is a `warn`."""

_ORDER = ("bad", "warn", "ok")


def natural(name: str) -> tuple[object, ...]:
    """A key that sorts r10 behind r9."""
    return tuple(int(part) if number % 2 else part for number, part in enumerate(_DIGITS.split(name)))


def level(health: Health, replica: Replica) -> str:
    """How it is, in a word: `ok`, `warn` or `bad`."""
    found = LEVELS.get(health.doubt(replica) or replica.state, "warn")
    return "warn" if found == "ok" and replica.speed.slowness > 1.0 else found


_Key = Callable[["Health", Replica, float], Any]

SORTS: dict[str, _Key] = {
    "trouble": lambda health, replica, now: _ORDER.index(level(health, replica)),
    "name": lambda health, replica, now: 0,
    "load": lambda health, replica, now: -replica.in_flight,
    "wait": lambda health, replica, now: -cost.expected_wait(replica, now),
    "cache": lambda health, replica, now: -replica.cache.held_tokens / (replica.cache.capacity or inf),
}
"""Orders of replicas: those in trouble first, then names; by name alone; most requests, longest wait, fullest KV
cache first."""


@dataclass(frozen=True, slots=True)
class View:
    """What of it is to be seen. Names are those of the query's parameters."""

    sort: str = "trouble"
    state: str = ""
    """Replicas in this state only."""
    page: int = 1
    replica: str = ""
    """Decisions for replicas with this in their id."""
    reason: str = ""
    """Decisions with this reason."""
    session: str = ""
    """Decisions of sessions whose digest begins so."""
    decisions: int = SHOWN_DECISIONS
    """So many at most."""

    @classmethod
    def of(cls, query: QueryParams) -> View:
        """As the query asks for it; what is empty is as if it were not there. Raises Refused."""
        given = {name: value.strip() for name, value in query.items() if value.strip()}
        if unknown := sorted(set(given) - set(cls.__slots__)):
            raise Refused(400, "invalid_query", f"Unknown parameter {unknown[0]!r}; known: {', '.join(cls.__slots__)}.")
        for name, allowed in (("sort", list(SORTS)), ("state", list(State))):
            if name in given and given[name] not in allowed:
                raise Refused(400, "invalid_query", f"{name} must be one of {', '.join(allowed)}, got {given[name]!r}.")
        numbers: dict[str, int] = {}
        for name in ("page", "decisions"):
            if (text := given.pop(name, None)) is not None:
                numbers[name] = number_of(name, text, 0, 999_999)
        return cls(**given, **numbers)  # type: ignore[arg-type]  # the rest are texts


class Overview:
    """What one router is and does, as it stands."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._describe = Replicas(router).describe

    def routes(self) -> list[Route]:
        return [Route("/overview", self.overview)]

    async def overview(self, request: Request) -> Response:
        return JSONResponse(self.told(View.of(request.query_params)))

    def told(self, view: View) -> dict[str, Any]:
        """All that is shown, fit for JSON."""
        router = self._router
        now = router.clock()
        return {
            "time": wall_clock(time.time()),
            "version": VERSION,
            "uptime_s": round(now - router.started_at, 1),
            "verdict": self._verdict(),
            "fleet": self._fleet(now),
            "policy": described(router.balancer.policy) | {"asked_by": router.switching.asked_by.get("policy")},
            "shadow": self._shadow(),
            "store": shared(router),
            "discovery": found(router),
            "pools": self._pools(),
            "draining": self._draining(),
            **self._replicas(view, now),
            "decisions": self.decisions(view),
        }

    def _verdict(self) -> dict[str, str]:
        """Whether all is well, in a word and a sentence."""
        router = self._router
        replicas = router.balancer.replicas.values()
        count, states = len(replicas), Counter(replica.state for replica in replicas)
        slow = sum(replica.state is State.READY and replica.speed.slowness > 1.0 for replica in replicas)
        gates = [each.gate for each in router.proxy.room.all]
        why = router.not_ready()
        if not count:
            missing = router.discovery.missing
            text = f"; {missing}" if missing else ""
            return {"level": "bad", "text": f"There are no replicas: every request is refused{text}"}
        if why is not None:
            return {"level": "bad", "text": f"Not ready: {why}"}
        parts = [f"{number} {STATES[state]}" for state, number in states.items() if state is not State.READY]
        parts += [f"{slow} slow"] * bool(slow)
        told = [f"{', '.join(sorted(parts))} of {counted(count, 'replica')}"] if parts else []
        empty = [each["pool"] for each in self._pools() if not each["ready"]]
        if empty:
            told.insert(0, f"no replica of {'pool' if len(empty) == 1 else 'pools'} {', '.join(empty)} is ready")
        if router.health.panic:
            told.insert(0, _panic(router.health))
        full = any(gate.active for gate in gates)
        if full:
            held = sum(gate.held for gate in gates)
            told.append(f"the KV caches are full: {counted(held, 'session')} held back")
        if not router.metrics.config_in_force:
            told.append("the configuration was refused, and an older one is in force: see the log")
        if away := router.discovery.missing or router.discovery.frozen:
            told.append(f"replicas may be missing, or gone: {away}")
        if router.sharing is not None and not router.sharing.up:
            told.append("the store is away, and nothing is shared with other routers")
        if told:
            bad = router.health.panic or states[State.EJECTED] or full or empty
            return {"level": "bad" if bad else "warn", "text": "; ".join(told)}
        return {"level": "ok", "text": "The replica is ready" if count == 1 else f"All {count} replicas are ready"}

    def _fleet(self, now: float) -> dict[str, Any]:
        router = self._router
        balancer, proxy = router.balancer, router.proxy
        replicas = balancer.replicas.values()
        states = Counter(replica.state for replica in replicas)
        regret = balancer.regret
        return {
            "replicas": len(replicas),
            "states": {state.value: states[state] for state in State},
            "requests_per_s": _rounded(proxy.rates.requests_per_s),
            "requests_per_s_series": [round(value, 2) for value in proxy.rates.series],
            "in_flight": sum(replica.in_flight for replica in replicas),
            "awaiting_first_token": sum(replica.pending for replica in replicas),
            "waiting": sum(each.waiting for each in proxy.room.all),
            "held_sessions": sum(each.gate.held for each in proxy.room.all),
            "pending_prefill_tokens": sum(replica.prefill_tokens for replica in replicas),
            "longest_wait_s": _rounded(max((cost.expected_wait(each, now) for each in balancer.ready), default=None)),
            "resident_tokens": sum(replica.cache.held_tokens for replica in replicas),
            "capacity_tokens": int(sum(replica.cache.capacity for replica in replicas)),
            "hit_rate": _rounded(proxy.rates.hit_rate),
            "regretted_tokens": {
                "elsewhere": sum(regret.elsewhere.values()),
                "evicted": sum(regret.evicted.values()),
            },
            "refusals": dict(sorted(router.metrics.refusals.items(), key=lambda item: -item[1])),
            "sessions": len(balancer.directory),
            "sessions_limit": balancer.directory.max_sessions,
            "connections": proxy.connections,
        }

    def _pools(self) -> list[dict[str, Any]]:
        """Each in its order, and how many of its replicas are ready; none where there is only one."""
        balancer, pools = self._router.balancer, self._router.fleet.pools
        sizes = Counter(replica.pool for replica in balancer.replicas.values())
        return [
            {"pool": pools.shown(pool), "replicas": sizes[pool], "ready": len(balancer.ready_in(pool))}
            for pool in (pools.all if pools.several else ())
        ]

    def _shadow(self) -> dict[str, Any] | None:
        balancer, switching = self._router.balancer, self._router.switching
        if balancer.shadow is not None:
            who = {"asked_by": switching.asked_by.get("shadow")}
            return described(balancer.shadow) | who | switching.disagreements() | {"fault": None}
        return {"fault": balancer.shadow_fault} if balancer.shadow_fault else None

    def _draining(self) -> list[dict[str, Any]]:
        replicas = self._router.balancer.replicas.values()
        draining = [each for each in replicas if each.state in (State.DRAINING, State.FINISHING)]
        draining += [each for each in self._router.fleet.drains if each not in draining]
        draining.sort(key=lambda each: natural(each.id))
        return [self.replica(each) for each in draining[:PER_PAGE]]

    def _replicas(self, view: View, now: float) -> dict[str, Any]:
        fleet = self._router.balancer.replicas.values()
        found = [each for each in fleet if not view.state or each.state == view.state]
        key = SORTS[view.sort]
        found.sort(key=lambda each: (key(self._router.health, each, now), natural(each.id)))
        pages = max(1, -(-len(found) // PER_PAGE))
        page = min(max(view.page, 1), pages)
        shown = found[(page - 1) * PER_PAGE : page * PER_PAGE]
        return {"page": page, "pages": pages, "found": len(found), "replicas": [self.replica(each) for each in shown]}

    def replica(self, replica: Replica) -> dict[str, Any]:
        """One replica: what `/replicas` says of it, and what only those who watch want to know."""
        tally = self._router.metrics.replicas.get(replica.id)
        health = self._router.health
        since, doubt, why = health.since(replica), health.doubt(replica), health.why(replica)
        return self._describe(replica) | {
            "level": level(health, replica),
            "label": STATES[replica.state] if doubt is None else f"{STATES[doubt]}, used all the same",
            "remark": "" if why == PLAINLY_READY else why,
            "since_s": None if since is None else round(max(0.0, time.time() - since), 1),
            "awaiting_first_token": replica.pending,
            "conversations": len(replica.cache),
            "hit_rate": None if not tally else _share(tally.cached_tokens, tally.prompt_tokens),
        }

    def decisions(self, view: View) -> list[dict[str, Any]]:
        """The latest that match, the latest first."""
        ahead = time.time() - self._router.clock()
        found = islice(self._matching(view), view.decisions)
        return [self._decision(number, made, ahead) for number, made in found]

    def _matching(self, view: View) -> Iterator[tuple[int, Decision]]:
        for number, made in self._router.proxy.decisions.latest():
            if (
                view.replica in made.replica
                and (not view.reason or made.reason == view.reason)
                and (not view.session or (made.key is not None and made.key.hex().startswith(view.session.lower())))
            ):
                yield number, made

    def _decision(self, number: int, made: Decision, ahead: float) -> dict[str, Any]:
        replica = self._router.balancer.replicas.get(made.replica)
        anew_s = None if replica is None or not made.resident_tokens else cost.prefill(replica, made.prompt_tokens)
        return {
            "number": number,
            "time": wall_clock(made.at + ahead),
            "session": None if made.key is None else made.key.hex(),
            "replica": made.replica or None,
            "reason": made.reason,
            "sentence": explanation.recalled(made, anew_s),
            "prompt_tokens": made.prompt_tokens,
            "resident_tokens": made.resident_tokens,
            "wait_s": _rounded(made.wait_s),
            "prefill_s": _rounded(made.prefill_s),
            "tries": made.tries,
            "failed": made.failed or None,
            "ended_by": made.cause or None,
            "first_byte_s": _rounded(made.first_byte_s) if made.first_byte_s >= 0 else None,
            "cached_share": _share(made.cached_tokens, made.told_prompt_tokens) if made.cached_tokens >= 0 else None,
        }


def reasons() -> list[str]:
    """Those that decisions can be filtered by: of choices."""
    return list(Reason)


def _panic(health: Health) -> str:
    """Of which sizes it is."""
    well = f"{health.well or 'None'} of {counted(health.counted, 'replica')} {'is' if health.well < 2 else 'are'} well"
    used = f"{health.doubted or 'none'} that {'is' if health.doubted < 2 else 'are'} not"
    return f"{well}; the panic rule uses {used}"


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole > 0 else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
