"""Pools: which one a request goes to, and what they are called. The core knows the first of them by no name.

So a fleet that gets pools keeps what it had: the first pool's replicas and their sessions' keys are what they were.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from router.settings import ModelsSettings

HEADER = b"x-warmroute-pool"
"""By which a client names the pool itself, in lower case."""

KNOWN_MODELS = 1024
"""Whose pools are remembered."""


class Pools:
    """Those of some settings; without any there is one, which has no name."""

    def __init__(self, given: Sequence[ModelsSettings] = ()) -> None:
        self.names = tuple(each.name for each in given)
        """In their order; the first is the default one."""
        self._patterns = [
            (self.core(each.name), [pattern.casefold().split("*") for pattern in each.models]) for each in given
        ]
        self.of_model = lru_cache(KNOWN_MODELS)(self._of_model)
        """The core's name of a model's pool: the first that has a pattern for it, else the default one."""

    @property
    def several(self) -> bool:
        """Whether there is anything to choose."""
        return len(self.names) > 1

    def core(self, name: str) -> str:
        """What the core calls a pool, given by its name or by none."""
        return "" if self.names[:1] == (name,) else name

    def shown(self, core: str) -> str:
        """What people call it; nothing where there is only one."""
        return (core or self.names[0]) if self.several else ""

    def of_header(self, value: bytes) -> str | None:
        """The core's name of the pool that a header names; None when there is none of that name."""
        name = value.decode("latin-1").strip()
        return self.core(name) if name in self.names else None

    def knows(self, name: str) -> bool:
        """Whether a replica may say that it is in this pool; without a name it is in the default one."""
        return not name or name in self.names

    @property
    def all(self) -> Iterable[str]:
        """The core's names of all, the default one first."""
        return ("", *self.names[1:])

    def _of_model(self, model: str) -> str:
        text = model.casefold()
        return next((pool for pool, patterns in self._patterns if any(_matches(text, each) for each in patterns)), "")


def _matches(text: str, parts: Sequence[str]) -> bool:
    """Whether a text is made of these parts with anything between. In one pass: the text is a client's."""
    first, *rest = parts
    if not rest:
        return text == first
    if not text.startswith(first):
        return False
    at, end = len(first), len(text) - len(rest[-1])
    for part in rest[:-1]:
        found = text.find(part, at, end)
        if found < 0:
            return False
        at = found + len(part)
    return at <= end and text.endswith(rest[-1])
