"""`/reload`: the configuration read anew and put in force."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from router.admin.answers import Refused, who
from router.changes import Change
from router.configuration import ConfigError
from router.reload import NoSource

if TYPE_CHECKING:
    from router.app import Router


class Reloading:
    """The configuration of one router."""

    def __init__(self, router: Router) -> None:
        self._router = router

    def routes(self) -> list[Route]:
        return [Route("/reload", self.reload, methods=["POST"])]

    async def reload(self, request: Request) -> Response:
        """As SIGHUP does, and tells what came of it."""
        try:
            changed, waiting = await self._router.reload.reload(who(request))
        except NoSource:
            message = "There is nothing to read anew: start the router with --config FILE to change its settings."
            raise Refused(409, "no_file", message) from None
        except ConfigError as error:
            raise Refused(422, "invalid_config", f"Nothing was changed. {error}") from None
        return JSONResponse({"changed": _told(changed), "takes_restart": _told(waiting)})


def _told(changes: list[Change]) -> list[dict[str, Any]]:
    return [{"key": change.key, "old": change.old, "new": change.new} for change in changes]
