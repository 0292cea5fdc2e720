"""What the screen shows: a router's overview, asked for by a thread, so that keys are heard meanwhile."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from router import console

EVERY_S = 2.0


@dataclass(frozen=True, slots=True)
class Seen:
    """The last overview, and since when there has been none; both at once when a router went away."""

    overview: dict[str, Any] | None = None
    trouble: str = ""
    """Why it is not answered; empty while it is."""
    since: datetime | None = None
    """Of the trouble."""


class Feed:
    """Asks until the process ends. `sort` may be changed at any time; `hurry` then asks at once."""

    def __init__(self, admin: console.Access, sort: str) -> None:
        self._admin = admin
        self.sort = sort
        self.seen = Seen(trouble="no answer yet")
        self.changed = threading.Event()
        """Set when there is something new to show; whoever shows it clears it."""
        self._hurry = threading.Event()
        threading.Thread(target=self._forever, name="feed", daemon=True).start()

    def hurry(self) -> None:
        """Ask now rather than at the next turn."""
        self._hurry.set()

    def _forever(self) -> None:
        while True:
            self._hurry.clear()
            self.seen = self._ask()
            self.changed.set()
            self._hurry.wait(EVERY_S)

    def _ask(self) -> Seen:
        before = self.seen
        try:
            return Seen(console.ask(self._admin, "/overview", query={"sort": self.sort}))
        except (console.Unreachable, console.Refused) as error:
            return Seen(before.overview, str(error), before.since or datetime.now(UTC))
