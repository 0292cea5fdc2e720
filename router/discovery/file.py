"""Replicas listed in a file, as `replicas` is written, that is read again whenever its content has changed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from router.aside import aside
from router.configuration import explained, parsed
from router.discovery.feed import Feed, Trouble, check_size
from router.discovery.targets import Target, listed
from router.files import bytes_of
from router.settings import ReplicaSettings, check_distinct, pool_fault

LOOK_S = 1.0
"""Between two looks at the file."""

MAX_BYTES = 2 << 20
"""Of a file: 10,000 replicas, as many as are taken, at 200 bytes each."""

ANSWER_S = 60.0
"""For a look at the file, and for making replicas of it. A file system that is gone may hang for good."""

CHANGING_S = 15.0
"""A file that is not the same twice for so long is complained about."""

TOLD_FAULTS = 3
"""At most, of one file."""

_LIST = TypeAdapter(list[ReplicaSettings])

T = TypeVar("T")


class FileSource:
    """A YAML or JSON file. What cannot be read for a list of replicas counts for nothing."""

    longest_pause_s = LOOK_S
    empty_after_s = 0.0
    """`[]` is what somebody wrote there; an empty file is no list."""

    def __init__(self, file: str, look_s: float = LOOK_S, *, pools: Sequence[str] = ()) -> None:
        """`pools` are the names that an entry may give."""
        self.name = f"file:{file}"
        self.made_of = (file, *pools)
        self._pools = pools
        self._file = file
        self._look_s = look_s
        self._seen: bytes | None = None
        """At the last look."""
        self._read: bytes | None = None
        """What was taken last, good or bad."""
        self._fault = ""
        """Of that, when it was bad."""
        self._changing_since: float | None = None
        self._at_work: asyncio.Future[Any] | None = None

    async def follow(self, feed: Feed) -> None:
        missed = False
        while True:
            try:
                seen = await self._aside(partial(bytes_of, self._file, MAX_BYTES))
            except ValueError as error:
                if missed or not feed.heard:
                    raise Trouble(str(error)) from None
                missed = True  # as between two links: one look is none
            else:
                missed = False
                await self._look(seen, feed)
            await asyncio.sleep(self._look_s)

    async def _look(self, seen: bytes, feed: Feed) -> None:
        """Take what the file holds when it was the same at the look before: half of it must not be taken for all.

        The content alone decides, whatever link leads there: times do not change with a Kubernetes ConfigMap's content,
        or do without. The first time half a file can do no harm, as nobody leaves.
        """
        settled, self._seen = seen == self._seen or not feed.heard, seen
        if not settled:
            now = time.monotonic()
            self._changing_since = now if self._changing_since is None else self._changing_since
            if now - self._changing_since >= CHANGING_S:
                raise Trouble(
                    "it changes all the time, and is read when it was the same twice: write it when there is news, and "
                    "then at once"
                )
            return
        self._changing_since = None
        if seen != self._read:
            try:
                targets, self._fault = await self._aside(partial(read, seen, self._pools)), ""
            except ValueError as error:
                targets, self._fault = [], str(error)
            self._read = seen
            if not self._fault:
                feed.tell(targets)
        if self._fault:
            raise Trouble(self._fault)
        feed.well()

    async def _aside(self, work: Callable[[], T]) -> T:
        """Where nothing else waits for it; one at a time. Raises Trouble when it hangs."""
        if self._at_work is not None:
            await self._ended(self._at_work)
        self._at_work = task = aside(work)
        await self._ended(task)
        return task.result()

    async def _ended(self, work: asyncio.Future[Any]) -> None:
        await asyncio.wait([work], timeout=ANSWER_S)
        if not work.done():
            raise Trouble(f"it has not been read within {ANSWER_S:g} s: does its file system hang?")


def read(data: bytes, pools: Sequence[str] = ()) -> list[Target]:
    """The replicas in a file that holds this. Raises ValueError saying what is wrong, with the remedy."""
    try:
        text = data.decode()
    except UnicodeError as error:
        raise ValueError(f"{error}: give a readable text file") from None
    try:
        tree = parsed(text)
    except ValueError as error:
        raise ValueError(f"it is {error}") from None
    if not isinstance(tree, list):
        raise ValueError(f"expected a list of replicas, got {type(tree).__name__}: write [] where there are to be none")
    check_size(tree)
    try:
        replicas = _LIST.validate_python(tree)
        check_distinct(replicas)
    except ValidationError as error:
        raise ValueError("; ".join(islice(explained(error, "replicas"), TOLD_FAULTS))) from None
    told = ((number, pool_fault(each.pool, pools)) for number, each in enumerate(replicas))
    if faults := list(islice((f"replicas.{number}.pool: {fault}" for number, fault in told if fault), TOLD_FAULTS)):
        raise ValueError("; ".join(faults))
    return listed(replicas)
