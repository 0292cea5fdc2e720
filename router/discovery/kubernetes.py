"""Replicas of a Kubernetes service: its EndpointSlices are listed, then watched from there, and listed again.

The protocol is that of https://kubernetes.io/docs/reference/using-api/api-concepts: a list in pages is of one
`resourceVersion`; a watch from there tells each change as a line, and a bookmark now and then; when the version has
been forgotten it says 410, as its status or in a line, and the list is read anew.
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass
from typing import TypeVar

import httpx
import msgspec

from router.discovery.api import Api
from router.discovery.feed import Feed, Trouble
from router.discovery.slices import Event, Naming, Page, Slice, Status, targets
from router.discovery.targets import shared
from router.settings import KubernetesSettings

PAGE_SLICES = 50
"""In one answer. A slice holds up to 1,000 endpoints, 100 by default, of a few hundred bytes each."""
MAX_SLICES = 10_000
MAX_PAGES = 4 * MAX_SLICES // PAGE_SLICES
"""Of one list: they need not be full."""
MAX_EXPIRED = 3
"""Watches one after the other of which each was told at once that its version is forgotten."""
MAX_PAGE_BYTES = 64 << 20
MAX_LINE_BYTES = 4 << 20
"""Of a watch, in which an object is one line: etcd takes none above 1.5 MiB by default."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Times:
    """All seconds that this takes or waits."""

    connect_s: float = 5.0
    answer_s: float = 30.0
    """For a page of a list, and for the head of a watch."""
    watch_s: float = 240.0
    """After so long the API server ends a watch, as it is asked to."""
    slack_s: float = 15.0
    """After so much more it is taken to hang."""
    relist_s: float = 900.0
    """Between two lists, give or take a tenth: what a watch may have missed is found then."""
    settle_s: float = 0.1
    """After lines of a watch: what comes meanwhile is taken together, however much is sent."""
    least_s: float = 1.0
    """A watch that ended sooner is not begun anew at once."""
    held_s: float = 5.0
    """After a fault watches must go well for so long until that is over: lists may work where they do not."""


class _Expired(Exception):
    """The API server does not know what changed since the version that was asked for."""


class KubernetesSource:
    """One service, or all slices that a selector finds, in one namespace."""

    longest_pause_s = 30.0
    empty_after_s = 10.0

    def __init__(self, settings: KubernetesSettings, id_of: Naming, times: Times = Times()) -> None:
        self.name = settings.name
        self.made_of = (settings, id_of("n", "p", 1))
        self._settings = settings
        self._id_of = id_of
        self._times = times
        self._slices: dict[str, Slice] = {}
        self._version = ""
        self._relist_at = 0.0
        self._expired = 0
        self._recovery: asyncio.TimerHandle | None = None
        """Set while a watch goes well, after a fault."""

    async def follow(self, feed: Feed) -> None:
        api = Api(self._settings, self._times.connect_s)
        try:
            await self._list(api)
            while True:
                self._tell(feed)
                await self._watch_on(api, feed)
                await self._list(api)
        finally:
            if self._recovery is not None:
                self._recovery.cancel()
                self._recovery = None
            await api.close()

    def _tell(self, feed: Feed) -> None:
        given = self._settings
        try:
            found = targets(self._slices.values(), given.port, given.scheme, self._id_of)
        except ValueError as error:
            raise Trouble(str(error)) from None
        feed.tell(shared(found, given.weight, given.ranks, given.pool), ends_outage=False)

    # The list

    async def _list(self, api: Api) -> None:
        """All slices, as of one version."""
        for _ in range(2):
            try:
                slices, version = await self._pages(api)
                break
            except _Expired:  # it took so long to read the pages
                continue
        else:
            raise Trouble("the API server forgets its list before it has told all of it")
        self._slices, self._version = slices, version
        self._relist_at = time.monotonic() + self._times.relist_s * (0.9 + 0.2 * random.random())

    async def _pages(self, api: Api) -> tuple[dict[str, Slice], str]:
        slices: dict[str, Slice] = {}
        query = {"limit": str(PAGE_SLICES)}
        for _ in range(MAX_PAGES):
            page = _decoded(await self._page(api, query), Page)
            slices |= {each.metadata.name: each for each in page.items or ()}
            if len(slices) > MAX_SLICES:
                raise Trouble(f"there are more than {MAX_SLICES} slices: ask for fewer by service or selector")
            if not page.metadata.next:
                break
            query["continue"] = page.metadata.next
        else:
            raise Trouble(f"the API server's list does not end within {MAX_PAGES} pages of {PAGE_SLICES} slices")
        if not page.metadata.resource_version:
            raise Trouble("the API server's list has no resourceVersion: it is none of Kubernetes")
        return slices, page.metadata.resource_version

    async def _page(self, api: Api, query: dict[str, str]) -> bytes:
        body = bytearray()
        try:
            async with asyncio.timeout(self._times.answer_s), api.ask(query) as response:
                if response.status_code == 410:
                    raise _Expired
                async for part in response.aiter_bytes():
                    body += part
                    if len(body) > MAX_PAGE_BYTES:
                        raise Trouble(f"a page of {PAGE_SLICES} slices is larger than {MAX_PAGE_BYTES} bytes")
        except TimeoutError:
            raise Trouble(f"the API server has not told its list within {self._times.answer_s:g} s") from None
        return bytes(body)

    # The watch

    async def _watch_on(self, api: Api, feed: Feed) -> None:
        """One watch after the other, each from where the one before ended, until it is time to list."""
        while (left_s := self._relist_at - time.monotonic()) > 0:
            began, expired = time.monotonic(), False
            try:
                await self._watch(api, feed, max(1.0, min(left_s, self._times.watch_s)))
            except _Expired:
                self._relist_at, expired = 0.0, True
            lasted_s = time.monotonic() - began
            self._expired = self._expired + 1 if expired and lasted_s < self._times.held_s else 0
            if self._expired > MAX_EXPIRED:
                raise Trouble("the API server has forgotten what it listed as soon as that is watched")
            if lasted_s < self._times.least_s:
                await asyncio.sleep(self._times.least_s * (0.5 + 0.5 * random.random()))

    async def _watch(self, api: Api, feed: Feed, for_s: float) -> None:
        """Until it ends, or is broken off. Raises _Expired."""
        query = {"watch": "1", "allowWatchBookmarks": "true", "resourceVersion": self._version}
        query["timeoutSeconds"] = str(round(for_s))
        try:
            async with asyncio.timeout(self._times.answer_s) as limit, api.ask(query) as response:
                if response.status_code == 410:
                    raise _Expired
                limit.reschedule(asyncio.get_running_loop().time() + for_s + self._times.slack_s)
                feed.alive()
                if not feed.up and self._recovery is None:
                    self._recovery = asyncio.get_running_loop().call_later(self._times.held_s, feed.well)
                await self._read(response, feed)
        except TimeoutError:
            raise Trouble("the API server leaves a watch without an answer, and without an end") from None

    async def _read(self, response: httpx.Response, feed: Feed) -> None:
        rest = bytearray()
        try:
            async for part in response.aiter_bytes():
                start, newline, end = part.rpartition(b"\n")
                if newline:
                    whole, rest = rest + start, bytearray(end)
                else:
                    rest += end
                if len(rest) > MAX_LINE_BYTES:
                    raise Trouble(f"a line of a watch is larger than {MAX_LINE_BYTES} bytes")
                if not newline:
                    continue
                news = [self._take(line) for line in whole.split(b"\n") if line]
                feed.alive()
                if any(news):
                    self._tell(feed)
                await asyncio.sleep(self._times.settle_s)
        except httpx.TransportError:
            return  # broken off, perhaps in the middle of a line: the next watch tells from the last whole one on

    def _take(self, line: bytes | bytearray) -> bool:
        """One event. Whether the slices have changed."""
        event = _decoded(line, Event)
        if event.type == "ERROR":
            status = _decoded(event.object, Status)
            if status.code == 410:
                raise _Expired
            raise Trouble(f"the API server ends a watch ({status.code}: {status.message})")
        found = _decoded(event.object, Slice)
        if event.type in ("ADDED", "MODIFIED"):
            self._slices[found.metadata.name] = found
        elif event.type == "DELETED":
            self._slices.pop(found.metadata.name, None)
        elif event.type != "BOOKMARK":
            raise Trouble(f"the API server tells what is not known here: an event of type {event.type[:100]!r}")
        self._version = found.metadata.resource_version or self._version
        return event.type != "BOOKMARK"


def _decoded(data: bytes | bytearray | msgspec.Raw, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, ValueError) as error:
        raise Trouble("the API server tells what cannot be read", str(error)) from None
