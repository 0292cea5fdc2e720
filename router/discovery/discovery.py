"""All sources of one router, and the task that makes the fleet what they say."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from router.discovery.feed import Feed, Source
from router.discovery.targets import Target
from router.settings import DiscoverySettings

if TYPE_CHECKING:
    from router.fleet import Fleet

log = logging.getLogger("warmroute.discovery")

SLICE_S = 0.004
"""The loop is held up for about so long while replicas join or leave, and then has as long for everything else."""


class Discovery:
    """Changes of the fleet that nobody orders. Without sources it does nothing."""

    def __init__(
        self, fleet: Fleet, settings: DiscoverySettings, applied: Callable[[], None], pools: Sequence[str] = ()
    ) -> None:
        """`applied` is called when the fleet has been made what the sources say. `pools` may be named by sources."""
        self._fleet = fleet
        self._applied = applied
        self.feeds = [Feed(source, self._told) for source in sources(settings, pools)]
        self._retired: list[str] = []
        """Sources that are configured no more. What they told stays until those that are have answered."""
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._stopping: set[asyncio.Task[None]] = set()
        self._order()

    def start(self) -> None:
        """Begin, in the running loop."""
        for feed in self.feeds:
            feed.start()
        self._task = asyncio.create_task(self._apply())

    async def stop(self) -> None:
        """End: nothing changes any more."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        await asyncio.gather(*(feed.stop() for feed in self.feeds), *self._stopping)

    def prepare(self, settings: DiscoverySettings, pools: Sequence[str] = ()) -> Callable[[], None]:
        """What follows these sources from now on: those that were followed before are not begun anew."""
        wanted = sources(settings, pools)

        def commit() -> None:
            known = {feed.name: feed for feed in self.feeds}
            feeds = []
            for source in wanted:
                before = known.get(source.name)
                if before is not None and before.source.made_of == source.made_of:
                    feeds.append(known.pop(source.name))
                else:
                    feeds.append(Feed(source, self._told))
                    if self._task is not None:
                        feeds[-1].start()
            for feed in known.values():
                self._stopping.add(task := asyncio.create_task(feed.stop()))
                task.add_done_callback(self._stopping.discard)
            names = {feed.name for feed in feeds}
            self._retired = [name for name in (*self._retired, *known) if name not in names]
            self.feeds = feeds
            self._order()

        return commit

    @property
    def missing(self) -> str | None:
        """The first source that has told nothing yet, and why; None when all have."""
        return next((f"{feed.name}: {feed.why}" for feed in self.feeds if not feed.heard), None)

    @property
    def frozen(self) -> str | None:
        """The first source that does not answer although it did, and why; None when there is none."""
        return next((f"{feed.name}: {feed.why}" for feed in self.feeds if feed.heard and not feed.up), None)

    def _told(self, source: str, targets: Sequence[Target]) -> None:
        self._fleet.tell(source, targets)
        if self._retired and self.missing is None:
            self._order()
        self._news.set()

    def _order(self) -> None:
        """Tell the fleet which sources there are, and which goes before which."""
        if self.missing is None:
            for name in self._retired:
                log.info("%s is not configured any more, and what it told goes", name)
            self._retired = []
        self._fleet.hear([*(feed.name for feed in self.feeds), *self._retired])
        self._news.set()

    async def _apply(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            try:
                await self._settle()
                self._applied()
            except Exception:
                log.exception("the fleet could not be made what was discovered, which should not be")

    async def _settle(self) -> None:
        """In slices, between which requests go on; begun anew when there is news."""
        changes = self._fleet.settle()
        began = time.monotonic()
        for _ in changes:
            if time.monotonic() - began > SLICE_S:
                await asyncio.sleep(SLICE_S)
                if self._news.is_set():
                    return
                began = time.monotonic()


def sources(settings: DiscoverySettings, pools: Sequence[str] = ()) -> list[Source]:
    """Those that are configured, in their order."""
    return list(_sources(settings, pools))


def _sources(settings: DiscoverySettings, pools: Sequence[str]) -> Iterator[Source]:
    """Loaded only when they are wanted: HTTP and DNS clients are slow to import."""
    if settings.file:
        from router.discovery.file import FileSource

        yield FileSource(settings.file, pools=pools)
    if settings.dns:
        from router.discovery.dns import DnsSource

        yield from map(DnsSource, settings.dns)
    if settings.kubernetes:
        from router.discovery.kubernetes import KubernetesSource
        from router.discovery.slices import naming

        for each in settings.kubernetes:
            yield KubernetesSource(each, naming(each, settings.kubernetes))
