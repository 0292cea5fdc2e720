"""`/livez`, `/readyz`, `/metrics`: what is asked of the process by whoever keeps it running."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from router.metrics.exposition import Exposition

if TYPE_CHECKING:
    from router.app import Router


class Process:
    """The process itself."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._exposition = Exposition(router.metrics)

    def routes(self) -> list[Route]:
        return [
            Route("/livez", self.livez),
            Route("/readyz", self.readyz),
            Route("/metrics", self.metrics),
        ]

    async def livez(self, _: Request) -> Response:
        return JSONResponse({"status": "alive"})

    async def readyz(self, _: Request) -> Response:
        why = self._router.not_ready()
        if why is None:
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": "not ready", "reason": why}, status_code=503)

    async def metrics(self, _: Request) -> Response:
        return Response(await self._exposition.text(), media_type=Exposition.content_type)
