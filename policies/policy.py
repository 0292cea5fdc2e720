"""The two-verb interface of every policy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from policies.events import Event
from policies.types import Choice, Needs, Replica, Request, Snapshot


@dataclass(frozen=True, slots=True)
class NoConfig:
    """The configuration of a policy that has no parameters."""


class Policy(ABC):
    """Chooses among candidates; learns only from events.

    A policy keeps no session table of its own where it can help it: homes come with the request, from the
    Balancer's directory, so that a switch of policy moves nobody.

    `Config` is a frozen dataclass of the policy's parameters, each with a default. It checks its own values and
    raises ValueError that names the parameter, the value and what is allowed.
    """

    name: ClassVar[str]
    needs: ClassVar[Needs] = Needs.NOTHING
    Config: ClassVar[type[Any]] = NoConfig

    def __init__(self, config: Any = None) -> None:
        self.config = self.Config() if config is None else config

    @abstractmethod
    def pick(self, request: Request, candidates: Sequence[Replica], now: float) -> Choice:
        """Choose one of `candidates` (never empty, in a fixed order) at `now` seconds.

        Reads and never learns: asked twice with no event between, it answers the same.
        """

    def explain(self, request: Request, candidates: Sequence[Replica], now: float) -> Choice:
        """What `pick` answers, with the candidates weighed beside it where the policy weighs any. As pure, slower."""
        return self.pick(request, candidates, now)

    def observe(self, event: Event) -> None:  # noqa: B027 - most policies learn nothing
        """Take note of what happened."""

    def snapshot(self) -> Snapshot:
        """Parameters and state, for people to look at."""
        return Snapshot(self.name, asdict(self.config))
