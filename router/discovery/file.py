"""Replicas listed in a file, as `replicas` is written, that is read again whenever its content has changed."""

from __future__ import annotations

import asyncio
import os
from itertools import islice

from pydantic import TypeAdapter, ValidationError

from router.configuration import explained, parsed
from router.discovery.feed import Feed, Trouble
from router.discovery.targets import Target, listed
from router.files import text_of
from router.settings import ReplicaSettings, check_distinct
from router.source import Content

LOOK_S = 1.0
"""Between two looks at the file."""

TOLD_FAULTS = 3
"""At most, of one file."""

_LIST = TypeAdapter(list[ReplicaSettings])


class FileSource:
    """A YAML or JSON file. What cannot be read for a list of replicas counts for nothing."""

    longest_pause_s = LOOK_S
    empty_after_s = 0.0
    """`[]` is what somebody wrote there; an empty file is no list."""

    def __init__(self, file: str, look_s: float = LOOK_S) -> None:
        self.name = f"file:{file}"
        self.made_of = file
        self._file = file
        self._content = Content(file)
        self._look_s = look_s

    async def follow(self, feed: Feed) -> None:
        while True:
            if feed.heard:  # the first time half a file can do no harm: nobody leaves
                await self._changed()
            self._content.note()
            feed.tell(await asyncio.to_thread(read, self._file))

    async def _changed(self) -> None:
        """Until it holds something else, good or bad, or is gone."""
        missing = False
        while not await asyncio.to_thread(self._content.changed):
            was_missing, missing = missing, not await asyncio.to_thread(os.path.exists, self._file)
            if was_missing and missing and self._content.digest is not None:
                return
            await asyncio.sleep(self._look_s)


def read(file: str) -> list[Target]:
    """The replicas in the file. Raises Trouble naming what is wrong and the remedy."""
    try:
        text = text_of(file)
    except ValueError as error:
        raise Trouble(str(error)) from None
    try:
        tree = parsed(text)
    except ValueError as error:
        raise Trouble(f"it is {error}") from None
    if not isinstance(tree, list):
        raise Trouble(f"expected a list of replicas, got {type(tree).__name__}: write [] where there are to be none")
    try:
        replicas = _LIST.validate_python(tree)
        check_distinct(replicas)
    except ValidationError as error:
        raise Trouble("; ".join(islice(explained(error, "replicas"), TOLD_FAULTS))) from None
    except ValueError as error:
        raise Trouble(str(error)) from None
    return listed(replicas)
