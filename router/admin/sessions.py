"""`/sessions`: who lives where."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import islice
from math import inf
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from router.admin.answers import Refused, no_such_replica, number_of

if TYPE_CHECKING:
    from router.app import Router


MOST = 1000
"""Sessions listed at once."""
LISTED = 50
"""Without a limit."""
SLICE = 500
"""Sessions looked at in one turn of the event loop: about a millisecond."""

SORTS: dict[str, Callable[[dict[str, Any]], float]] = {
    "recent": lambda session: session["idle_s"],
    "tokens": lambda session: -session["tokens"],
}


class Sessions:
    """The session directory of one router."""

    def __init__(self, router: Router) -> None:
        self._router = router

    def routes(self) -> list[Route]:
        return [Route("/sessions", self.sessions), Route("/sessions/{key:path}", self.session)]

    async def sessions(self, request: Request) -> Response:
        """Those that are known, the latest first; `?limit=` of them, `?replica=` for those that live there.

        `?sort=tokens` for the largest first. Told slice by slice: a large directory must not hold up the event loop.
        """
        query = request.query_params
        limit = number_of("limit", query.get("limit", str(LISTED)), 1, MOST)
        sort = query.get("sort", "recent")
        if sort not in SORTS:
            raise Refused(400, "invalid_query", f"sort must be one of {', '.join(SORTS)}, got {sort!r}.")
        replica = query.get("replica")
        if replica is not None and replica not in self._router.balancer.replicas:
            raise no_such_replica(replica, self._router.balancer.replicas)
        directory = self._router.balancer.directory
        if sort == "recent" and replica is None:
            keys = [key for key, _ in islice(directory.lately(-inf), limit)]
        else:
            keys = directory.keys()
        found: list[dict[str, Any]] = []
        for number, key in enumerate(keys, 1):
            if number % SLICE == 0:
                await asyncio.sleep(0)
            if (session := self._summary(key, replica)) is not None:
                found.append(session)
            if len(found) >= limit + SLICE:
                found = _first(found, limit, sort)
        found = _first(found, limit, sort)
        return JSONResponse({"sessions": found, "known": len(directory)})

    def _summary(self, key: bytes, replica: str | None) -> dict[str, Any] | None:
        """A session with its homes; None when it is not known any more, or has none on the replica wanted."""
        now = self._router.clock()
        branches = self._router.balancer.directory.branches(key, now)
        tokens: dict[str, int] = {}
        for branch in branches:
            for home in branch.homes:
                if home.resident and home.replica.present:
                    tokens[home.replica.id] = tokens.get(home.replica.id, 0) + home.counted
        if not branches or (replica is not None and replica not in tokens):
            return None
        return {
            "session": key.hex(),
            "homes": [{"replica": name, "tokens": held} for name, held in tokens.items()],
            "tokens": sum(tokens.values()),
            "conversations": len(branches),
            "in_flight": sum(branch.open for branch in branches),
            "idle_s": round(now - branches[0].last_use, 3),
        }

    async def session(self, request: Request) -> Response:
        """By the digest in hexadecimal, or by the session's own value; `?pool=` for the one that it has there.

        One id in several pools is several sessions: without a pool it is the first pool's that has one.
        """
        pools = self._router.fleet.pools
        pool = pool_of(self._router, request.query_params.get("pool"))
        key = key_of(self._router, request.path_params["key"], pool=pool)
        if found := self.homes(key):
            told: dict[str, Any] = {"session": key.hex(), "homes": found}
            if pools.several:
                told["pool"] = pools.shown(home_pool(self._router, key) or "")
            return JSONResponse(told)
        message = "No home is known for this session: it has sent nothing lately, or went by another key."
        raise Refused(404, "unknown_session", message)

    def homes(self, key: bytes) -> list[dict[str, Any]]:
        """Where its conversations have been, the latest first; none when it is not known."""
        now = self._router.clock()
        return [
            {
                "replica": home.replica.id,
                "tokens": home.tokens,
                "tier": "host" if home.on_host else "gpu" if home.resident else None,
                "idle_s": round(now - home.last_use, 1),
                "branch": number,
                "in_flight": branch.open,
            }
            for number, branch in enumerate(self._router.balancer.directory.branches(key, now))
            for home in branch.homes
        ]


def _first(sessions: list[dict[str, Any]], count: int, sort: str) -> list[dict[str, Any]]:
    return sorted(sessions, key=SORTS[sort])[:count]


def pool_of(router: Router, given: str | None) -> str | None:
    """The core's name of a pool that a query names; None when it names none. Raises Refused."""
    if given is None:
        return None
    pools = router.fleet.pools
    if given not in pools.names:
        known = ", ".join(pools.names) or "none: there is only one, without a name"
        raise Refused(400, "invalid_query", f"pool must be one of those there are, got {given!r}; known are {known}.")
    return pools.core(given)


def home_pool(router: Router, key: bytes | None) -> str | None:
    """The core's name of the pool in which a session lives; None when it is not known."""
    branches = () if key is None else router.balancer.directory.branches(key, router.clock())
    return next((home.replica.pool for branch in branches for home in branch.homes), None)


def key_of(router: Router, given: str, tenant: bytes = b"", pool: str | None = None) -> bytes:
    """The key of a session given by its digest in hexadecimal, if one is known by it, or by its own value.

    Where API keys keep holders' sessions apart, it is that of `tenant`; without one, of the first holder who has one of
    this value. Likewise of `pool`, as the core calls it, or of the first that has one.
    """
    keys = router.proxy.keys
    tenants = [tenant] if tenant or keys is None else [holder.tenant for holder in keys.holders.values()]
    pools = router.fleet.pools.all if pool is None else (pool,)
    of_value = [router.identity.digest_of(given, tenant, pool.encode()) for pool in pools for tenant in tenants]
    digest = _hex(given)
    now = router.clock()
    for key in [digest, *of_value] if digest is not None else of_value:
        if router.balancer.directory.branches(key, now):
            return key
    return of_value[0]


def _hex(given: str) -> bytes | None:
    try:
        return bytes.fromhex(given) if len(given) == 32 else None
    except ValueError:
        return None
