"""The application of the admin port: the endpoints of every noun, and how faults are told."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from router.admin.answers import Refused, refused
from router.admin.explain import Explain
from router.admin.overview import Overview
from router.admin.policy import PolicyInForce
from router.admin.process import Process
from router.admin.reload import Reloading
from router.admin.replicas import Replicas
from router.admin.sessions import Sessions
from router.admin.ui import Page

if TYPE_CHECKING:
    from router.app import Router

NOUNS = (Process, Replicas, Sessions, PolicyInForce, Explain, Reloading, Overview, Page)
"""Each is made with the router and has `routes`; what is added here is served and told in errors."""


class Admin:
    """The endpoints over one router."""

    def __init__(self, router: Router) -> None:
        self._routes = [route for noun in NOUNS for route in noun(router).routes()]

    def app(self) -> Starlette:
        handlers = {HTTPException: self._as_json, Refused: refused}
        return Starlette(routes=self._routes, exception_handlers=handlers)

    async def _as_json(self, _: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = f"{error.detail}. The admin port answers {', '.join(map(_spelt, self._routes))}"
        body = {"error": {"message": message, "code": HTTPStatus(error.status_code).name.lower()}}
        return JSONResponse(body, error.status_code, dict(error.headers or {}))


def _spelt(route: Route) -> str:
    methods = sorted((route.methods or set()) - {"HEAD"})
    return f"{' '.join(methods)} {route.path.replace(':path', '')}"
