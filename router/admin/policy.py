"""`/policy`: the policy in charge and the one in its shadow, shown and changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from policies import registry
from policies.policy import Policy
from router.admin.answers import Refused, json_of, who
from router.switching import described, parsed

if TYPE_CHECKING:
    from router.app import Router

_EXAMPLE = '{"name": "random", "parameters": {"seed": 7}}'


class PolicyInForce:
    """The policies of one router."""

    def __init__(self, router: Router) -> None:
        self._router = router

    def routes(self) -> list[Route]:
        return [
            Route("/policy", self.policy, methods=["GET", "PUT"]),
            Route("/policy/shadow", self.shadow, methods=["PUT", "DELETE"]),
        ]

    async def policy(self, request: Request) -> Response:
        if request.method == "PUT":
            return await self._change(request, self._router.orders.switch)
        balancer = self._router.balancer
        policy, shadow = balancer.policy, balancer.shadow
        snapshot = policy.snapshot()
        return JSONResponse(
            {
                "policy": policy.name,
                "asked_by": self._router.switching.asked_by.get("policy"),
                "parameters": snapshot.parameters,
                "needs": [need.name.lower() for need in policy.needs if need.name],
                "state": snapshot.state,
                "pools": self._pools(),
                "shadow": None if shadow is None else self._shadow(shadow),
                "shadow_fault": balancer.shadow_fault or None,
                "known_policies": list(registry.POLICIES),
            }
        )

    def _pools(self) -> dict[str, Any]:
        """What it has learned in each of the other pools; `state` is of the default one."""
        balancer, pools = self._router.balancer, self._router.fleet.pools
        return {pools.shown(pool): balancer.policy_in(pool).snapshot().state for pool in pools.all if pool}

    def _shadow(self, shadow: Policy) -> dict[str, Any]:
        switching = self._router.switching
        return described(shadow) | {"asked_by": switching.asked_by.get("shadow")} | switching.disagreements()

    async def shadow(self, request: Request) -> Response:
        if request.method == "DELETE":
            return JSONResponse(self._router.orders.run_shadow(None, who(request)))
        return await self._change(request, self._router.orders.run_shadow)

    async def _change(self, request: Request, change: Callable[[Policy, str], dict[str, Any]]) -> Response:
        given = await json_of(request, _EXAMPLE)
        try:
            return JSONResponse(change(parsed(given), who(request)))
        except ValueError as error:
            raise Refused(422, "invalid_policy", f"Nothing was changed: {error}.") from None
