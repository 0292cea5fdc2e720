"""`/ui`: the router for people. Read-only: it shows what `/overview` tells, and changes nothing."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from importlib.resources import files
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from policies.types import State
from router import units
from router.admin.answers import Refused
from router.admin.explain import Explain
from router.admin.overview import PER_PAGE, SORTS, STATES, Overview, View, reasons
from router.admin.sessions import Sessions, key_of
from router.admin.ui import drawing

if TYPE_CHECKING:
    from router.app import Router

HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "cache-control": "no-store",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
"""Should markup of somebody else's ever get into the page, it is still not run, and tells nobody."""

STATIC = {"page.css": "text/css", "page.js": "text/javascript", "icon.svg": "image/svg+xml"}

REFRESH_S = 5
"""Without JavaScript, the page is loaded anew so often; page.js asks more often, and only replaces what changed."""


class Page:
    """The pages over one router."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._overview = Overview(router)
        self._explain = Explain(router)
        self._sessions = Sessions(router)
        self._templates = Environment(
            loader=PackageLoader("router.admin.ui"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            auto_reload=False,
        )
        self._templates.filters |= {
            "counted": units.counted,
            "tokens": units.tokens,
            "seconds": units.seconds,
            "duration": units.duration,
            "percent": units.percent,
            "clock": units.clock,
            "short": units.short,
            "spark": drawing.spark,
        }
        assets = files("router.admin.ui").joinpath("static")
        self._assets = {name: assets.joinpath(name).read_bytes() for name in STATIC}

    def routes(self) -> list[Route]:
        return [
            Route("/ui", self.page),
            Route("/ui/replicas/{id:path}", self.replica),
            Route("/ui/sessions/{key:path}", self.session),
            Route("/ui/static/{name}", self.static),
        ]

    async def page(self, request: Request) -> Response:
        try:
            view = View.of(_without_pause(request))
        except Refused as refused:
            return await self._error(request, refused)
        told = self._overview.told(view)
        return await self._render(request, "overview.html", told | _CHOICES | {"view": view, "counts": _counts(told)})

    async def replica(self, request: Request) -> Response:
        replica = self._router.balancer.replicas.get(request.path_params["id"])
        if replica is None:
            message = "There is no such replica: it has left, or never was in the fleet."
            return await self._error(request, Refused(404, "unknown_replica", message))
        told = self._overview.told(View(replica=replica.id))
        return await self._render(request, "replica.html", told | {"replica": self._overview.replica(replica)})

    async def session(self, request: Request) -> Response:
        key = key_of(self._router, request.path_params["key"])
        told = self._overview.told(View(session=key.hex()))
        homes = self._sessions.homes(key)
        if not homes and not told["decisions"]:
            message = "Nothing is known of this session: it has sent nothing lately, or goes by another key."
            return await self._error(request, Refused(404, "unknown_session", message))
        try:
            told |= {"next": self._explain.of_session(key), "none": ""}
        except Refused as refused:
            told |= {"next": None, "none": str(refused)}
        return await self._render(request, "session.html", told | {"session": key.hex(), "homes": homes})

    async def static(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self._assets:
            return await self._error(request, Refused(404, "not_found", "There is no such file."))
        headers = HEADERS | {"cache-control": "no-cache"}
        return Response(self._assets[name], media_type=STATIC[name], headers=headers)

    async def _error(self, request: Request, refused: Refused) -> Response:
        told = {"title": HTTPStatus(refused.status).phrase, "message": str(refused)}
        return await self._render(request, "error.html", told, refused.status)

    async def _render(self, request: Request, template: str, told: dict[str, Any], status: int = 200) -> Response:
        paused = "paused" in request.query_params
        told |= {"paused": paused, "toggle": _toggled(request, paused), "refresh_s": REFRESH_S}
        # In a thread: a page of a hundred tiles takes some 10 ms, and answers must flow meanwhile.
        html = await asyncio.to_thread(self._templates.get_template(template).render, told)
        return HTMLResponse(html, status, HEADERS)


_CHOICES = {"sorts": list(SORTS), "states": STATES, "reasons": reasons(), "per_page": PER_PAGE}


def _counts(told: dict[str, Any]) -> str:
    states = told["fleet"]["states"].items()
    return ", ".join(f"{count} {STATES[State(state)]}" for state, count in states if count)


def _without_pause(request: Request) -> Any:
    query = request.query_params
    return type(query)([(name, value) for name, value in query.multi_items() if name != "paused"])


def _toggled(request: Request, paused: bool) -> str:
    """The same page, standing still or going on."""
    query = list(_without_pause(request).multi_items())
    return "?" + urlencode(query if paused else [*query, ("paused", "yes")])
