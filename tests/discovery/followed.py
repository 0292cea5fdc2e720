"""A source followed in the test's own process: what it told, and whether it is well."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from router.discovery.feed import Feed, Source
from router.discovery.targets import Target
from tests.fakes.wire import eventually


class Followed:
    """The sets that a source told."""

    def __init__(self, source: Source) -> None:
        self.sets: list[dict[str, Target]] = []
        self.feed = Feed(source, self._tell)

    def _tell(self, _: str, targets: Sequence[Target]) -> None:
        self.sets.append({target.id: target for target in targets})

    @property
    def last(self) -> dict[str, Target]:
        return self.sets[-1] if self.sets else {}

    async def ids(self, *ids: str) -> dict[str, Target]:
        """Wait until it tells these and is well."""
        await self.until(lambda: set(self.last) == set(ids) and self.feed.up, f"{ids}")
        return self.last

    async def trouble(self, *texts: str) -> str:
        """Wait until it is in trouble and says so."""
        await self.until(lambda: not self.feed.up and all(text in self.feed.why for text in texts), f"{texts}")
        return self.feed.why

    async def until(self, holds: Callable[[], object], what: str) -> None:
        try:
            await eventually(holds, what)
        except AssertionError as error:
            raise AssertionError(f"{error}; told {list(self.last)}, up {self.feed.up}: {self.feed.why}") from None


@asynccontextmanager
async def followed(source: Source) -> AsyncIterator[Followed]:
    """Until the end of the block."""
    made = Followed(source)
    made.feed.start()
    try:
        yield made
    finally:
        await made.feed.stop()
