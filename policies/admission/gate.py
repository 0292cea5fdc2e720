"""The KV gate: when the live sessions do not fit, some wait as a whole, so that the others keep their caches.

It acts only when the live sessions' contexts exceed what the caches hold, and what waits waits long: either as
computing again takes a good part of the fleet's time, or so long that a cache spares nobody any time. Then sessions are
let in by a limit in tokens of context. The limit is what the fleet was seen to stand: it falls while the fleet drowns,
rises while it does not, and is never below what fits. See docs/decisions/0017-admission.md for the measurements behind
the constants.
"""

from __future__ import annotations

from math import inf

from policies.admission.line import Held, Line
from policies.admission.pressure import LONGEST_LOOK_S, Pressure
from policies.admission.room import Ticket
from policies.admission.tenures import Tenures
from policies.balancer import Balancer
from policies.types import Request

LOOK_S = 1.0
"""Between two looks at the fleet."""

CONTROL_S = 30.0
"""Between two changes of the limit, and how long a flood must last: half the time over which pressure is averaged."""

FITS = 0.8
"""Share of the caches' tokens that the limit is never below: the rest is what ended sessions leave behind, and what is
uneven between replicas."""

FLOODED, DROWNING, CALM = 1.0, 0.4, 0.1
"""Of `Pressure.ratio`: above the first a fleet is behind by more than a cold prefill, whether or not it computes again;
above the second the limit falls, if it does; below the last the limit rises."""

AGAIN = 0.15
"""Of `Pressure.again`: less is not what makes others wait."""

FALL, RISE = 0.92, 1.0005
"""Steps of the limit: each time that it is changed, and each second."""

LEAST_TENURE_S = 300.0
"""A session that was let in is not sent back sooner for another: fetching it back costs a cold prefill."""

EXCHANGING = 0.1
"""Share of the fleet's time that exchanges may take: each costs a cold prefill, behind which others wait."""

MOST_EXCHANGES = 4.0
"""At one look, saved up while nobody was due."""

OPEN_S = 120.0
"""With nobody held for so long, the gate opens."""

STEPS = 250
"""Sessions, sub-agents among them, after which a look goes through no more: a router that counted fifty thousand at
once would keep all others' streams waiting for a quarter of a second."""


class Gate:
    """Of one router, or of one of its pools."""

    def __init__(self, balancer: Balancer, max_hold_s: float, pool: str = "") -> None:
        self.line = Line(max_hold_s)
        self.tenures = Tenures(balancer.directory, pool)
        self.pressure = Pressure()
        self.active = False
        self.activations = 0
        self.exchanges = 0
        """Tenures ended for a session that had waited `max_hold_s`."""
        self.sent_back = 0
        """Tenures ended as the fleet drowned."""
        self.capacity_tokens = 0
        """Of the caches of the replicas that are ready, as the engines tell. As of the last count."""
        self.limit_tokens = 0.0
        """Of the contexts of those let in."""
        self._balancer = balancer
        self._pool = pool
        self._looked_at = self._control_at = -inf
        self._credit = 0.0
        """Exchanges that may be made."""
        self._crowded_at = 0.0
        self._seeking = False
        """It looks for the live sessions, to see whether they fit."""
        self._afloat_at = inf
        """Since when the fleet is flooded: when it last was not, and later by what nobody waited since."""
        self._falling = False
        """Sessions are sent back until the limit is kept to."""

    @property
    def held(self) -> int:
        """Sessions that wait."""
        return len(self.line)

    @property
    def admitted(self) -> int:
        """Sessions that have been let in; 0 while it does not act."""
        return len(self.tenures) if self.active else 0

    def passes(self, request: Request, now: float) -> bool:
        """Whether the request may go on: its session has been let in, or it names none."""
        key, tenures = request.key, self.tenures
        if key is None or not request.turn or tenures.of(key) is not None:
            return True
        tenure = tenures.of(request.parent)
        if tenure is None and not self.line and self.fits(request.prompt_tokens):
            tenure = tenures.let_in(key if request.parent is None else request.parent, request.prompt_tokens, now)
        if tenure is None:
            return False
        tenures.join(key, tenure)
        return True

    def look(self, now: float) -> list[Ticket]:
        """To be called about once a second: watch, decide, and say whose sessions have been let in."""
        passed = now - self._looked_at
        if passed < LOOK_S:
            return []
        self._looked_at = now
        self.pressure.look(self._balancer, now, self._pool)
        if self.pressure.ratio <= FLOODED or passed > LONGEST_LOOK_S:
            self._afloat_at = now
        elif not self.pressure.pending:  # the mean is of those before: while nobody waits the flood does not go on
            self._afloat_at += passed
        if not self.active:
            self._consider(now)
            return []
        self.line.forget_absent(now)
        if self.line:
            self._crowded_at = now
        elif now - self._crowded_at > OPEN_S:
            return self.open()
        if now >= self._control_at:
            self._control_at = now + CONTROL_S
            self._control()
        self.tenures.count(min(STEPS, self.tenures.keys // int(CONTROL_S) + 1), now)
        if self._falling:
            self._send_back()
        return self._let_in(min(passed, LONGEST_LOOK_S), now)

    def open(self) -> list[Ticket]:
        """Act no more. The tickets of all that were held."""
        self.active = self._falling = self._seeking = False
        self.tenures.clear()
        return self.line.clear()

    # The limit

    def _drowns(self) -> bool:
        return self.pressure.ratio > DROWNING and self.pressure.again > AGAIN

    def _overwhelmed(self, now: float) -> bool:
        return self._drowns() or now - self._afloat_at >= CONTROL_S

    def _consider(self, now: float) -> None:
        """Act, if the live sessions are too many. Finding them may take several looks."""
        if not self._seeking:
            if now < self._control_at or not self._overwhelmed(now):
                return
            self._control_at = now + CONTROL_S
            self.tenures.seek()
            self._seeking = True
        if self.tenures.find(STEPS, now):
            return
        self._seeking = False
        self.capacity_tokens = self._capacity()
        if 0 < self.capacity_tokens < self.tenures.tokens and self._overwhelmed(now):
            self._begin(now)
        else:
            self.tenures.clear()

    def _begin(self, now: float) -> None:
        """Act: all live sessions have been let in, and the limit is set below them."""
        self.active = True
        self.activations += 1
        self._crowded_at = now
        self._control_at = now + CONTROL_S
        self.limit_tokens = float(self.tenures.tokens)
        # While a flooded fleet computes what it never had, nothing tells how far to go: as far as is never too far.
        self._fall(FALL if self._drowns() else FITS)

    def _capacity(self) -> int:
        """0 when an engine has not told its own: nothing is known to be too much then."""
        sizes = [max(r.cache.gpu_tokens or 0, r.cache.host_tokens or 0) for r in self._balancer.ready_in(self._pool)]
        return sum(sizes) if all(sizes) else 0

    def _control(self) -> None:
        """Move the limit."""
        self.capacity_tokens = self._capacity()
        # What a limit does is seen once it is kept to.
        if self._drowns() and self.capacity_tokens and not self._falling:
            self._fall(FALL)
        self.limit_tokens = max(self.limit_tokens, FITS * self.capacity_tokens)

    def _fall(self, step: float) -> None:
        """Lower the limit."""
        lower = step * min(self.limit_tokens, self.tenures.tokens)
        self.limit_tokens = max(lower, FITS * self.capacity_tokens)
        self._falling = True

    def _send_back(self) -> None:
        """Keep to the limit: cold sessions go first, then new ones."""
        tenures = self.tenures
        for _ in range(STEPS):
            tenure = tenures.first_to_go()
            if tenure is None or tenures.tokens <= self.limit_tokens:
                self._falling = False
                return
            tenures.end(tenure)
            self.sent_back += 1

    # Letting in

    def _let_in(self, passed: float, now: float) -> list[Ticket]:
        """Sessions whose turn it is and that fit; and those that have waited for the longest in the place of others."""
        tickets: list[Ticket] = []
        present = self.line.present(now)
        if self.line and self.pressure.ratio < CALM:
            self.limit_tokens *= RISE**passed
        for key, held in present:
            if not self.fits(held.tokens):
                break
            tickets += self._admit(key, held, now)
        ready = self._balancer.ready_in(self._pool)
        cold_s = max(1.0, self.pressure.cold_s)
        self._credit = min(self._credit + EXCHANGING * passed * len(ready) / cold_s, MOST_EXCHANGES)
        while self._credit >= 1.0 and (overdue := self.line.overdue(now)) is not None and self._exchange(now):
            self._credit -= 1.0
            tickets += self._admit(*overdue, now)
        return tickets

    def fits(self, tokens: int) -> bool:
        """Whether one more session of so many tokens can be let in."""
        if self.tenures.full:
            return False
        return not self.tenures or self.tenures.tokens + tokens <= self.limit_tokens

    def _exchange(self, now: float) -> bool:
        """End the longest tenure, if it is long enough."""
        longest = self.tenures.oldest()
        if longest is None or now - longest.since < LEAST_TENURE_S:
            return False
        self.tenures.end(longest)
        self.exchanges += 1
        return True

    def _admit(self, key: bytes, held: Held, now: float) -> list[Ticket]:
        self.line.let_in(key, now)
        # A sub-agent's sub-agent may have been in the line for itself when its parent was let in with another.
        tenure = self.tenures.of(key) or self.tenures.let_in(key, held.tokens, now)
        for ticket in held.tickets:
            self.tenures.join(ticket.request.key, tenure)
        return list(held.tickets)
