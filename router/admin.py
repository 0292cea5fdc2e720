"""The admin port: what an operator, a probe or Prometheus asks. Reads only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from policies import registry
from policies.cost import expected_wait
from policies.types import Replica
from router.proxy.upstream import Upstream

if TYPE_CHECKING:
    from router.app import Router


class Admin:
    """The endpoints over one router."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._clock: Callable[[], float] = router.clock

    def app(self) -> Starlette:
        routes = [
            Route("/livez", self.livez),
            Route("/readyz", self.readyz),
            Route("/metrics", self.metrics),
            Route("/replicas", self.replicas),
            Route("/sessions/{key:path}", self.session),
            Route("/policy", self.policy),
        ]
        return Starlette(routes=routes, exception_handlers={HTTPException: _as_json})

    async def livez(self, _: Request) -> Response:
        return JSONResponse({"status": "alive"})

    async def readyz(self, _: Request) -> Response:
        why = self._router.not_ready()
        if why is None:
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": "not ready", "reason": why}, status_code=503)

    async def metrics(self, _: Request) -> Response:
        metrics = self._router.metrics
        return Response(metrics.exposition(), media_type=metrics.content_type)

    async def replicas(self, _: Request) -> Response:
        replicas = self._router.balancer.replicas
        return JSONResponse({"replicas": [self._describe(replicas[name]) for name in sorted(replicas)]})

    def _describe(self, replica: Replica) -> dict[str, Any]:
        now = self._clock()
        load = None
        if replica.load is not None:
            load = asdict(replica.load)
            load["age_s"] = round(now - load.pop("at"), 3)
        return {
            "id": replica.id,
            "url": replica.address.url if isinstance(replica.address, Upstream) else None,
            "state": replica.state,
            "why": self._router.health.why(replica),
            "since": _wall_clock(self._router.health.since(replica)),
            "weight": replica.weight,
            "in_flight": replica.in_flight,
            "served": replica.served,
            "pending_prefill_tokens": replica.prefill_tokens,
            "expected_wait_s": round(expected_wait(replica, now), 4),
            "cache_since_s": round(now - replica.since, 1),
            "load": load,
        }

    async def session(self, request: Request) -> Response:
        """By the digest in hexadecimal, or by the session's own value."""
        given: str = request.path_params["key"]
        digest = self._router.identity.digest_of(given)
        now = self._clock()
        for key in filter(None, (_hex(given), digest)):
            if homes := self._router.balancer.directory.homes(key, now):
                found = [
                    {"replica": home.replica_id, "tokens": home.tokens, "idle_s": round(now - home.last_use, 1)}
                    for home in homes
                ]
                return JSONResponse({"session": key.hex(), "homes": found})
        message = "No home is known for this session: it has sent nothing lately, or went by another key."
        return JSONResponse({"error": {"message": message, "code": "unknown_session"}}, status_code=404)

    async def policy(self, _: Request) -> Response:
        policy = self._router.balancer.policy
        snapshot = policy.snapshot()
        return JSONResponse(
            {
                "policy": policy.name,
                "parameters": snapshot.parameters,
                "needs": [need.name.lower() for need in policy.needs if need.name],
                "state": snapshot.state,
                "known_policies": list(registry.POLICIES),
            }
        )


def _wall_clock(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def _hex(given: str) -> bytes | None:
    try:
        return bytes.fromhex(given) if len(given) == 32 else None
    except ValueError:
        return None


async def _as_json(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    known = "/livez /readyz /metrics /replicas /sessions/{key} /policy"
    message = f"{error.detail}. The admin port answers GET {known}"
    body = {"error": {"message": message, "code": error.status_code}}
    return JSONResponse(body, error.status_code, dict(error.headers or {}))
