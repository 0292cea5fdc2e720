"""The admin port of several workers: one answers what is asked, all are given what is ordered.

An order goes to the lowest worker first, and to the others only when that has carried it out. One that ends meanwhile,
or does not answer, is no fault: it hears of orders through the store, and who takes its place is given the settings in
force. What a worker does not tell in time is left out: who asks here has limits of his own, probes and scrapes above
all.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from router.admin.answers import Refused, body_of, refused, who
from router.admin.overview import View
from router.metrics.exposition import Exposition
from router.metrics.merged import Merged
from router.workers import figures
from router.workers.crew import Crew
from router.workers.member import Member
from router.workers.worker import CLIENT, RELOAD

READY_S = 1.0
"""For workers to say whether one is ready. The Helm chart's probe waits 2 s."""
ANSWER_S = 3.0
"""For a worker to tell what it knows. Prometheus waits 10 s for a page, the command 5 s for an answer."""
ORDER_S = 30.0
"""For a worker to do what it is ordered, or to explain."""

MAX_BODY_BYTES = 64 << 20
"""Of a request to be explained. Each worker has its own, narrower limits."""

METHODS = ["GET", "POST", "PUT", "DELETE"]

_OURS = {b"connection", b"transfer-encoding", b"content-length", b"authorization", CLIENT.encode()}
"""Headers of a request that do not go on to a worker."""

_THEIRS = {b"connection", b"transfer-encoding", b"content-length", b"date", b"server"}
"""Headers of an answer that do not go on to who asked."""


class Front:
    """Over one crew."""

    def __init__(self, crew: Crew, reloaded: Callable[[], None]) -> None:
        """`reloaded` is called when the workers have read the configuration anew."""
        self._crew = crew
        self._reloaded = reloaded
        self.merged = Merged()

    def app(self) -> Starlette:
        routes = [
            Route("/livez", self.livez),
            Route("/readyz", self.readyz),
            Route("/metrics", self.metrics),
            Route("/replicas", self.replicas),
            Route("/overview", self.overview),
            Route("/{path:path}", self.other, methods=METHODS),
        ]
        return Starlette(routes=routes, exception_handlers={Refused: refused})

    async def livez(self, _: Request) -> Response:
        return JSONResponse({"status": "alive"})

    async def readyz(self, _: Request) -> Response:
        """As soon as one worker is ready, and as long."""
        asked = [asyncio.create_task(each.ask(_get("/readyz"), READY_S)) for each in self._crew.living]
        not_ready = None
        try:
            for answering in asyncio.as_completed(asked):
                answer = await answering
                if answer is not None and answer.status_code == 200:
                    return JSONResponse({"status": "ready"})
                not_ready = answer or not_ready
        finally:
            for each in asked:
                each.cancel()
        if not_ready is not None:
            return _passed(not_ready)
        why = "draining" if self._crew.stopping else "no worker answers" if asked else "no worker serves yet"
        return JSONResponse({"status": "not ready", "reason": why}, status_code=503)

    async def metrics(self, _: Request) -> Response:
        counted = await asyncio.gather(*(self._count(member) for member in self._crew.living))
        return Response(await self.merged.text(set(counted)), media_type=Exposition.content_type)

    async def _count(self, member: Member) -> str | None:
        """Take what it counts now. Returns its name when it has told that."""
        name = member.name
        for answer in await self._of([member], "/samples"):
            if member.up and member.name == name:  # else it has ended, and is counted among those
                self.merged.take(name, answer.content)
                return name
        return None

    async def replicas(self, request: Request) -> Response:
        member, answer = await self._one(request)
        if answer.is_error:
            return _passed(answer)
        beside = self._beside(member)
        loads = await self._of(beside, "/loads")
        told_by_all = len(loads) == len(beside)
        return JSONResponse(figures.replicas(answer.json(), [each.json() for each in loads], told_by_all))

    async def overview(self, request: Request) -> Response:
        view = View.of(request.query_params)
        member, answer = await self._one(request)
        if answer.is_error:
            return _passed(answer)
        beside = self._beside(member)
        others, loads = await asyncio.gather(
            asyncio.gather(*(self._ask(each, request, b"") for each in beside)), self._of(beside, "/loads")
        )
        living = {member.number: answer.json()}
        for each, told in zip(beside, others, strict=True):
            if told is not None and not told.is_error:
                living[each.number] = told.json()
        told_by_all = len(loads) == len(beside)
        by_others = [each.json() for each in loads]
        return JSONResponse(figures.overview(living, by_others, told_by_all, len(self._crew.members), view.decisions))

    async def other(self, request: Request) -> Response:
        path = request.url.path
        body = await body_of(request, MAX_BODY_BYTES)
        member, answer = await self._one(request, body)
        if answer.is_error or request.method in ("GET", "HEAD") or path == "/explain":
            return _passed(answer)
        beside = self._beside(member)
        if path == "/reload":
            self._reloaded()
            for each in self._crew.members:
                if not each.up:
                    each.tell(RELOAD)  # it may have begun with what was in force before
        answers = await asyncio.gather(*(self._ask(each, request, body) for each in beside))
        for each, told in zip(beside, answers, strict=True):
            if told is not None and told.is_error:
                message = f"Worker {member.number} did it, worker {each.number} did not: {_message(told)}"
                raise Refused(502, "not_all_workers", message)
            if told is None and path == "/reload":
                each.tell(RELOAD)  # as soon as it can
        return _passed(answer)

    # Asking workers

    def _beside(self, member: Member) -> list[Member]:
        return [each for each in self._crew.living if each is not member]

    async def _one(self, request: Request, body: bytes = b"") -> tuple[Member, httpx.Response]:
        """The answer of the lowest worker that answers. Raises Refused when none does."""
        for member in self._crew.living:
            answer = await self._ask(member, request, body)
            if answer is not None:
                return member, answer
        raise Refused(503, "no_worker", "No worker answers: they start, or are busy. See the log, and ask again.")

    async def _ask(self, member: Member, request: Request, body: bytes) -> httpx.Response | None:
        """The answer to the same request of one worker; None when there is none."""
        target = request.scope["raw_path"].split(b"?")[0]
        if query := request.scope["query_string"]:
            target += b"?" + query
        headers = [(name, value) for name, value in request.headers.raw if name not in _OURS]
        headers.append((CLIENT.encode(), who(request).encode()))
        url = httpx.URL("http://worker", raw_path=target)
        limit_s = ANSWER_S if request.method in ("GET", "HEAD") else ORDER_S
        return await _told(member, httpx.Request(request.method, url, headers=headers, content=body), limit_s)

    async def _of(self, members: list[Member], target: str) -> list[httpx.Response]:
        """The answers of those that give one."""
        answers = await asyncio.gather(*(_told(member, _get(target), ANSWER_S) for member in members))
        return [answer for answer in answers if answer is not None]


async def _told(member: Member, request: httpx.Request, limit_s: float) -> httpx.Response | None:
    """Who was silent when last looked after is not waited for."""
    return None if member.silent else await member.ask(request, limit_s)


def _get(target: str) -> httpx.Request:
    return httpx.Request("GET", f"http://worker{target}")


def _passed(answer: httpx.Response) -> Response:
    passed = Response(answer.content, answer.status_code)
    passed.raw_headers += [(name, value) for name, value in answer.headers.raw if name.lower() not in _THEIRS]
    return passed


def _message(answer: httpx.Response) -> Any:
    try:
        return answer.json()["error"]["message"]
    except (json.JSONDecodeError, TypeError, KeyError):
        return answer.text
