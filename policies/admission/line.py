"""The line before the KV gate: sessions that wait as a whole, and whose turn it is."""

from __future__ import annotations

from collections import OrderedDict, deque
from math import inf

from policies.admission.room import RETRY_S, SURE_DEPARTURES, Priority, Ticket, bounded

ABSENT_S = 180.0
"""A held session whose client has not come again for so long has left: three times the longest `retry-after`."""

SURE_S = 60.0
"""Of letting in, before the rate of it says how long a session waits at least: sessions go seldom, and in bursts."""

_RANKS = {Priority.HIGH: 0, Priority.NORMAL: 1, Priority.LOW: 2}


class Held:
    """A session that waits to be let in."""

    __slots__ = ("priority", "seen", "since", "tickets", "tokens", "warm")

    def __init__(self, now: float) -> None:
        self.since = self.seen = now
        self.tickets: deque[Ticket] = deque()
        """None while its client, refused, has not come again."""
        self.tokens = 0
        self.warm = False
        self.priority = Priority.NORMAL


class Line:
    """Of one gate."""

    def __init__(self, max_hold_s: float) -> None:
        self.max_hold_s = max_hold_s
        self._held: OrderedDict[bytes, Held] = OrderedDict()
        """Those held longest first."""
        self._entries: deque[float] = deque(maxlen=64)
        """When the last ones were let in."""

    def __len__(self) -> int:
        """Sessions that wait."""
        return len(self._held)

    def __contains__(self, session: bytes | None) -> bool:
        return session in self._held

    # Tickets

    def keep(self, ticket: Ticket, now: float) -> Held:
        """The place of the ticket's session, a new one at the end when it has none. The ticket is not added."""
        assert ticket.session is not None
        held = self._held.get(ticket.session)
        if held is None:
            held = self._held[ticket.session] = Held(now)
        held.seen = now
        held.tokens = max(held.tokens, ticket.request.prompt_tokens)
        held.warm = ticket.warm
        held.priority = ticket.priority
        return held

    def cancel(self, ticket: Ticket) -> None:
        """The client has left, and with its last request its session."""
        assert ticket.session is not None
        held = self._held[ticket.session]
        held.tickets.remove(ticket)
        if not held.tickets:
            del self._held[ticket.session]

    def refuse(self, ticket: Ticket, now: float) -> None:
        """The ticket has waited long enough. Its session keeps its place for a while."""
        assert ticket.session is not None
        held = self._held[ticket.session]
        held.tickets.remove(ticket)
        held.seen = now

    def least_wait_s(self, ticket: Ticket, most_s: float, now: float) -> float:
        """Before its session could be let in at the present rate, at the least; 0 when too little is known.

        What is more than `most_s` may be more than is said: nobody counts on when a thousand are refused at once.
        """
        rate = self._rate(now)
        if rate is None:
            return 0.0
        mine = self._held.get(ticket.session) if ticket.session is not None else None
        if mine is None:
            mine = Held(now)
            mine.warm, mine.priority = ticket.warm, ticket.priority
        rank, most, before = self._rank(mine, now), most_s * rate, 0
        for held in self._held.values():
            if self._rank(held, now) < rank:
                before += 1
                if before > most:
                    break
        return before / rate

    def retry_after_s(self, ticket: Ticket, now: float) -> int:
        """For a session that is held."""
        return bounded(self.least_wait_s(ticket, RETRY_S[1], now) or inf)

    def _rate(self, now: float) -> float | None:
        """Sessions let in a second, of late."""
        if len(self._entries) < SURE_DEPARTURES or now - self._entries[0] < SURE_S:
            return None
        return len(self._entries) / (now - self._entries[0])

    def _rank(self, held: Held, now: float) -> tuple[int, int, int, float]:
        """Order in the line: those that have waited for half of the bound, by age; then by priority, warm ones before
        cold ones, by age."""
        if now - held.since > 0.5 * self.max_hold_s:
            return 0, 0, 0, held.since
        return 1, _RANKS[held.priority], not held.warm, held.since

    # Sessions

    def present(self, now: float) -> list[tuple[bytes, Held]]:
        """Those that can be let in, by key, whose turn it is first."""
        present = [(key, held) for key, held in self._held.items() if held.tickets]
        present.sort(key=lambda each: self._rank(each[1], now))
        return present

    def overdue(self, now: float) -> tuple[bytes, Held] | None:
        """The one held longest, by key, once that is `max_hold_s`."""
        oldest = next(((key, held) for key, held in self._held.items() if held.tickets), None)
        return oldest if oldest is not None and now - oldest[1].since >= self.max_hold_s else None

    def let_in(self, key: bytes, now: float) -> None:
        """This one waits no more."""
        del self._held[key]
        self._entries.append(now)

    def forget_absent(self, now: float) -> None:
        """Those whose client has not come again lose their place."""
        for key in [key for key, held in self._held.items() if not held.tickets and now - held.seen > ABSENT_S]:
            del self._held[key]

    def clear(self) -> list[Ticket]:
        """Nobody waits any more. The tickets of all that did."""
        tickets = [ticket for held in self._held.values() for ticket in held.tickets]
        self._held.clear()
        self._entries.clear()
        return tickets
