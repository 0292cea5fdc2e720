"""The admin port: what an operator, a probe or Prometheus asks. Only `/policy` changes anything."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from policies import cost, registry
from policies.balancer import NoReplica
from policies.policy import Policy
from policies.speed import Speed
from policies.types import Replica
from policies.types import Request as Asked
from router import errors, explanation
from router.proxy.exchange import BYTES_PER_TOKEN
from router.proxy.upstream import Upstream
from router.switching import described, parsed

if TYPE_CHECKING:
    from router.app import Router

MAX_POLICY_BYTES = 65_536
"""Of a policy's description."""

_EXAMPLE = 'Write it as in {"name": "random", "parameters": {"seed": 7}}.'


class Refused(Exception):
    """A request that cannot be served: status, machine-readable code, and a message with the remedy."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


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
            Route("/policy", self.policy, methods=["GET", "PUT"]),
            Route("/policy/shadow", self.shadow, methods=["PUT", "DELETE"]),
            Route("/explain", self.explain, methods=["GET", "POST"]),
        ]
        return Starlette(routes=routes, exception_handlers={HTTPException: _as_json, Refused: _refused})

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
            "others_in_flight": cost.requests(replica, now) - replica.in_flight,
            "expected_wait_s": round(cost.expected_wait(replica, now), 4),
            "cache_since_s": round(now - replica.since, 1),
            "resident_tokens": replica.cache.held_tokens,
            "capacity_tokens": int(replica.cache.capacity),
            "live_tokens": int(replica.cache.live(now)),
            "speed": _speed(replica.speed),
            "load": load,
        }

    async def session(self, request: Request) -> Response:
        """By the digest in hexadecimal, or by the session's own value."""
        key = self._key_of(request.path_params["key"])
        now = self._clock()
        found = [
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
        if found:
            return JSONResponse({"session": key.hex(), "homes": found})
        message = "No home is known for this session: it has sent nothing lately, or went by another key."
        raise Refused(404, "unknown_session", message)

    def _key_of(self, given: str) -> bytes:
        """The key of a session given by its digest in hexadecimal, if one is known by it, or by its own value."""
        key = _hex(given)
        if key is not None and self._router.balancer.directory.branches(key, self._clock()):
            return key
        return self._router.identity.digest_of(given)

    # Policies

    async def policy(self, request: Request) -> Response:
        if request.method == "PUT":
            return await self._change(request, self._router.switching.switch)
        balancer = self._router.balancer
        policy, shadow = balancer.policy, balancer.shadow
        snapshot = policy.snapshot()
        return JSONResponse(
            {
                "policy": policy.name,
                "parameters": snapshot.parameters,
                "needs": [need.name.lower() for need in policy.needs if need.name],
                "state": snapshot.state,
                "shadow": None if shadow is None else described(shadow) | self._router.switching.disagreements(),
                "shadow_fault": balancer.shadow_fault or None,
                "known_policies": list(registry.POLICIES),
            }
        )

    async def shadow(self, request: Request) -> Response:
        if request.method == "DELETE":
            return JSONResponse(self._router.switching.run_shadow(None, _who(request)))
        return await self._change(request, self._router.switching.run_shadow)

    async def _change(self, request: Request, change: Callable[[Policy, str], dict[str, Any]]) -> Response:
        body = await _body(request, MAX_POLICY_BYTES)
        try:
            given = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise Refused(400, "invalid_json", f"The body is not JSON: {error}. {_EXAMPLE}") from None
        try:
            return JSONResponse(change(parsed(given), _who(request)))
        except ValueError as error:
            raise Refused(422, "invalid_policy", f"Nothing was changed: {error}.") from None

    async def explain(self, request: Request) -> Response:
        """What would be chosen for the very request that is sent here, and why; nothing is changed by it.

        `?session=` is a session's own value or its digest, and wins over what headers and body tell. `?prompt_tokens=`
        is the size of the prompt; by default the body's, without one what the session's home last held.
        """
        router, now = self._router, self._clock()
        headers = {name: value for name, value in request.headers.raw if name in router.identity.header_names}
        identity = router.identity.from_headers(headers)
        body = await _body(request, router.settings.limits.body_bytes)
        if body:
            content_type = request.headers.get("content-type", "").encode("latin-1")
            identity = router.proxy.look_into(identity, body, content_type, now)
        asked = Asked(
            identity.key, identity.parent, identity.fingerprint, len(body) // BYTES_PER_TOKEN, identity.blocks
        )
        if session := request.query_params.get("session"):
            asked.key, asked.parent = self._key_of(session), None
        given = request.query_params.get("prompt_tokens")
        if given is not None or not body:
            asked.prompt_tokens = self._estimate(asked.key, given)
        try:
            choice = router.balancer.explain(asked, now)
        except NoReplica as none:
            refusal = errors.NO_REPLICA[none.reason]
            raise Refused(refusal.status, refusal.reason, refusal.message) from None
        return JSONResponse({"policy": router.balancer.policy.name} | explanation.table(choice, asked))

    def _estimate(self, key: bytes | None, given: str | None) -> int:
        """The estimate that the Balancer corrects to the prompt tokens given, or to those last held at home."""
        if given is not None and not (given.isascii() and given.isdigit() and len(given) <= 12):
            raise Refused(400, "invalid_query", f"prompt_tokens must be a number of tokens, 0 or more, got {given!r}.")
        branches = self._router.balancer.directory.branches(key, self._clock()) if key is not None else ()
        # The one that a request without a body is taken to continue.
        branch = min(branches, key=lambda branch: (branch.open > 0, branch.fork), default=None)
        if branch is None:
            return int(given or 0)
        tokens = max((home.whole for home in branch.homes), default=0) if given is None else int(given)
        return int(tokens / branch.ratio)


def _wall_clock(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def _hex(given: str) -> bytes | None:
    try:
        return bytes.fromhex(given) if len(given) == 32 else None
    except ValueError:
        return None


def _speed(speed: Speed) -> dict[str, Any]:
    step_s, slope_s, stall = speed.decode
    return {
        "prefill_factor": round(speed.factor, 4),
        "step_ms": round(step_s * 1000, 3),
        "slope_ms": round(slope_s * 1000, 4),
        "stall": round(stall, 3),
        "observations": {"prefills": speed.prefills, "decodes": speed.decodes},
    }


async def _body(request: Request, limit: int) -> bytes:
    """The whole body. Raises Refused when it is longer than `limit`."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > limit:
            raise Refused(413, "body_too_large", f"The body is longer than {limit} bytes.")
    return bytes(body)


def _who(request: Request) -> str:
    return f"{request.client.host}:{request.client.port}" if request.client is not None else "an unknown client"


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    return JSONResponse({"error": {"message": str(error), "code": error.code}}, error.status)


async def _as_json(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    known = "GET /livez /readyz /metrics /replicas /sessions/{key} /policy /explain, PUT /policy /policy/shadow"
    message = f"{error.detail}. The admin port answers {known}"
    body = {"error": {"message": message, "code": error.status_code}}
    return JSONResponse(body, error.status_code, dict(error.headers or {}))
