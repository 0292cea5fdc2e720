"""`/explain`: where a request would go, and why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from policies.balancer import NoReplica
from policies.types import Request as Asked
from router import errors, explanation
from router.admin.answers import Refused, body_of, number_of
from router.admin.sessions import home_pool, key_of, pool_of
from router.identity import is_json, model_of, responses
from router.pools import HEADER as POOL_HEADER
from router.proxy.exchange import BYTES_PER_TOKEN

if TYPE_CHECKING:
    from router.app import Router

MOST_TOKENS = 10**12
"""Of a prompt: more than any engine takes, and few enough to reckon with."""


class Explain:
    """The choices of one router, asked for and not made."""

    def __init__(self, router: Router) -> None:
        self._router = router

    def routes(self) -> list[Route]:
        return [Route("/explain", self.explain, methods=["GET", "POST"])]

    async def explain(self, request: Request) -> Response:
        """What would be chosen for the very request that is sent here, and why; nothing is changed by it.

        `?session=` is a session's own value or its digest, and wins over what headers and body tell. `?prompt_tokens=`
        is the size of the prompt; by default the body's, without one what the session's home last held. `?key=` names
        the holder whose request it is, where API keys are asked for. `?pool=` wins over the pool that header and body
        tell; without any of them it is that in which the session lives.
        """
        router, now = self._router, self._router.clock()
        headers = {name: value for name, value in request.headers.raw if name in router.identity.header_names}
        tenant = self._tenant(request.query_params.get("key"))
        body = await body_of(request, router.settings.limits.body_bytes)
        content_type = request.headers.get("content-type", "").encode("latin-1")
        pool = self._pool(request, headers, body, content_type)
        identity = router.identity.from_headers(headers, tenant, (pool or "").encode())
        if body:
            identity = router.proxy.look_into(identity, body, content_type, now)
        asked = Asked(
            identity.key, identity.parent, identity.fingerprint, len(body) // BYTES_PER_TOKEN, identity.blocks
        )
        if body and not identity.encoded and (response := responses.previous(body)) is not None:
            asked.response = router.identity.response_key(response, tenant)
        if session := request.query_params.get("session"):
            asked.key, asked.parent = key_of(router, session, tenant, pool), None
        asked.pool = (home_pool(router, asked.key) if pool is None else pool) or ""
        given = request.query_params.get("prompt_tokens")
        if given is not None or not body:
            asked.prompt_tokens = self._estimate(asked.key, given)
        return JSONResponse(self._told(asked))

    def of_session(self, key: bytes) -> dict[str, Any]:
        """Where the session's next request would go, when it goes on with what its home last held. Raises Refused."""
        pool = home_pool(self._router, key) or ""
        return self._told(Asked(key, prompt_tokens=self._estimate(key, None), pool=pool))

    def _pool(self, request: Request, headers: Mapping[bytes, bytes], body: bytes, content_type: bytes) -> str | None:
        """The core's name of the pool that the query, a header or the body's model tells; None when nothing does.

        Raises Refused for one that there is not.
        """
        pools = self._router.fleet.pools
        given = request.query_params.get("pool")
        if given is None and pools.several:
            named = request.headers.getlist(POOL_HEADER.decode())
            given = named[-1] if named else None
        if given is not None:
            return pool_of(self._router, given)
        if pools.several and body and is_json(headers, content_type) and (model := model_of(body)) is not None:
            return pools.of_model(model)
        return None

    def _told(self, asked: Asked) -> dict[str, Any]:
        router = self._router
        try:
            choice = router.balancer.explain(asked, router.clock())
        except NoReplica as none:
            refusal = errors.NO_REPLICA[none.reason]
            raise Refused(refusal.status, refusal.reason, refusal.message) from None
        told = {"policy": router.balancer.policy.name} | explanation.table(choice, asked)
        pools = router.fleet.pools
        return told | {"pool": pools.shown(asked.pool)} if pools.several else told

    def _tenant(self, holder: str | None) -> bytes:
        if holder is None:
            return b""
        keys = self._router.proxy.keys
        if keys is None or holder not in keys.holders:
            raise Refused(400, "invalid_query", f"key must be the name of a holder of API keys, got {holder!r}.")
        return keys.holders[holder].tenant

    def _estimate(self, key: bytes | None, given: str | None) -> int:
        """The estimate that the Balancer corrects to the prompt tokens given, or to those last held at home."""
        asked = None if given is None else number_of("prompt_tokens", given, 0, MOST_TOKENS)
        branches = self._router.balancer.directory.branches(key, self._router.clock()) if key is not None else ()
        # The one that a request without a body is taken to continue.
        branch = min(branches, key=lambda branch: (branch.open > 0, branch.fork), default=None)
        if branch is None:
            return asked or 0
        tokens = max((home.whole for home in branch.homes), default=0) if asked is None else asked
        return int(tokens / branch.ratio)
