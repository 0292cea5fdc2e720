"""The two-verb interface of every policy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from policies.events import Event
from policies.types import Choice, Needs, Replica, Request, Snapshot


class Policy(ABC):
    """Chooses among candidates; learns only from events.

    A policy keeps no session table: homes come with the request, from the Balancer's directory, so that
    a switch of policy moves nobody.
    """

    name: ClassVar[str]
    needs: ClassVar[Needs] = Needs.NOTHING

    @abstractmethod
    def pick(self, request: Request, candidates: Sequence[Replica], now: float) -> Choice:
        """Choose one of `candidates` (never empty, in a fixed order) at `now` seconds.

        Reads and never learns: asked twice with no event between, it answers the same.
        """

    def observe(self, event: Event) -> None:  # noqa: B027 - most policies learn nothing
        """Take note of what happened."""

    def snapshot(self) -> Snapshot:
        return Snapshot(self.name)
