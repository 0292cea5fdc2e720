"""A session stays where its KV cache is, for as long as that is worth more than the wait there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any

import numpy as np
from numpy.typing import NDArray

from policies import cost, slow_start
from policies.events import Event, LoadReported, ReplicaAdded, ReplicaChanged, ReplicaRemoved, Routed, RoutedElsewhere
from policies.field import Field, Rates, Vector
from policies.hashing import rendezvous
from policies.policy import Policy
from policies.scoring import shortlist
from policies.selection import Selection
from policies.speed import unit_prefill_s
from policies.types import Candidate, Choice, Needs, Reason, Replica, Request, Resident, Snapshot

EXPLAINED = 8
"""Candidates shown by `explain`, the chosen one among them."""

_OF_THE_FLEET = (ReplicaAdded, ReplicaRemoved, ReplicaChanged)

TIE_S = 1e-3
"""Costs this close are equal: rendezvous order decides, the same on every router."""


@dataclass(frozen=True, slots=True)
class SessionAffinityConfig:
    """Parameters of `session_affinity`. The defaults are of the placement study on real sessions, section 7."""

    hysteresis_s: float = 1.0
    """Seconds by which another replica must be better before a session leaves its KV cache."""
    beta: float = 1.0
    """Weight of the seconds for which a prefill makes those wait who decode beside it."""
    gamma: float = 0.5
    """Weight of the seconds by which a prefill delays those who are still to come."""
    theta_s: float = 4.0
    """Price of a new placement on a replica whose cache is full of live sessions, in proportion below, seconds."""
    spread_s: float = 0.0
    """Price of each request in flight, seconds. 0.3 to 3 even out running requests, and cost KV."""
    grace_s: float = 300.0
    """For so long after it joined a replica gets no session that is resident on another, seconds."""
    rate_tau_s: float = 120.0
    """Time over which arrivals are averaged, seconds."""
    slow_start_s: float = 30.0
    """For so long after it joined or came back a replica is spared a crowd of new sessions, seconds."""

    def __post_init__(self) -> None:
        for name in ("hysteresis_s", "beta", "gamma", "theta_s", "spread_s", "grace_s", "slow_start_s"):
            value = getattr(self, name)
            if not (value >= 0 and isfinite(value)):
                raise ValueError(f"{name} must be a finite number, 0 or more, got {value}")
        if not (self.rate_tau_s > 0 and isfinite(self.rate_tau_s)):
            raise ValueError(f"rate_tau_s must be a finite number of seconds above 0, got {self.rate_tau_s}")


class SessionAffinity(Policy):
    """The least expected seconds, one's own and those it costs others.

    Sending a request with n prompt tokens to replica r costs

        w + pre + beta * stall * b * add + gamma * lam / (2 (1 - rho)) * (add^2 + 2 add w) + spread * b

    seconds: `w` until its prefill can begin, `pre` to prefill what is not resident there; `add`, which is `pre` without
    the overhead of a pass when it joins the pass of others that wait, for each of `b` neighbours whose decoding rests
    meanwhile, and what it delays those to come (the value function of an M/G/1 queue: Hyytia, Penttinen and Aalto, EJOR
    217, 2012; `lam` arrivals a second, `rho` the share of time spent in prefill).
    Where nothing of the session is resident, theta * (live tokens / capacity) is added: what living there will cost.
    The session stays with the replica that holds it until another is better by the hysteresis.
    """

    name = "session_affinity"
    needs = Needs.SESSION | Needs.FINGERPRINT | Needs.BLOCKS
    Config = SessionAffinityConfig

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self._rates: dict[Replica, Rates] = {}
        self._field = Field(self._rates, self.config.rate_tau_s)
        self._selection: Selection | None = None
        self._fleet_changed = False

    def pick(self, request: Request, candidates: Sequence[Replica], now: float) -> Choice:
        residents = request.residents
        if not residents:
            return self._place(request, candidates, now)
        incumbent = residents[0] if len(residents) == 1 else self._incumbent(request)
        prompt = request.prompt_tokens if request.prompt_tokens > 0 else 0
        wait_s, prefill_s, stay_s = self._resident_s(incumbent, request, now)
        selection, field = self._over(candidates, now), self._field
        # No other can cost less than a full prefill at the fleet's best speed, or than what holds it, too.
        bound = field.least_factor * unit_prefill_s(prompt, 0)
        if len(residents) > 1:
            bound = min(bound, *(self._resident_s(r, request, now)[2] for r in residents if r is not incumbent))
        reason, best = Reason.HOME, incumbent.replica
        held: Resident | None = incumbent
        if stay_s > bound + self.config.hysteresis_s:
            costs = self._costs(selection, request, now)
            costs[self._newborn(incumbent, now)] = np.inf
            for other in residents:
                costs[field.place(other.replica)] = self._resident_s(other, request, now)[2]
            least = selection.least(costs)
            if stay_s > costs[least] + self.config.hysteresis_s:
                best = field.replica(least)
                held = next((r for r in residents if r.replica is best), None)
                reason = Reason.SPLIT if request.concurrent else Reason.MOVED
                wait_s, prefill_s = self._seconds(best, held, request, now)
        tokens = held.tokens if held is not None else 0
        return Choice(best, reason, wait_s, tokens if tokens < prompt else prompt, prefill_s)

    def explain(self, request: Request, candidates: Sequence[Replica], now: float) -> Choice:
        choice = self.pick(request, candidates, now)
        held = {resident.replica: resident for resident in request.residents}
        selection = self._over(candidates, now)
        self._field.bring_up(now)
        newborn = self._newborn(self._incumbent(request), now) if held else None
        weighed = [
            self._terms(
                replica, selection, held.get(replica), request, now, self._barred(replica, held, selection, newborn)
            )
            for replica in candidates
        ]
        choice.candidates = shortlist(weighed, choice.replica, EXPLAINED)
        return choice

    def _barred(
        self,
        replica: Replica,
        held: dict[Replica, Resident],
        selection: Selection,
        newborn: NDArray[np.bool_] | None,
    ) -> str:
        """Why the candidate cannot get the request whatever it costs; empty when it can."""
        if replica in held:
            return ""
        i = self._field.place(replica)
        if selection.shut[i]:
            return "weight"
        return "grace" if newborn is not None and newborn[i] else ""

    # What a candidate costs

    def _incumbent(self, request: Request) -> Resident:
        """Whoever holds the most of this very branch; only if nobody does, of one that shares its beginning.

        Among equals it is whom the prompt goes on from: a main thread's home, not its forks'.
        """
        return max(request.residents, key=lambda r: (r.own, r.tokens, r.whole))

    def _seconds(self, replica: Replica, held: Resident | None, request: Request, now: float) -> tuple[float, float]:
        """Until its prefill begins there, and for the prefill."""
        return cost.expected_wait(replica, now), cost.prefill(replica, max(0, request.prompt_tokens), held)

    def _resident_s(self, resident: Resident, request: Request, now: float) -> tuple[float, float, float]:
        """The wait, the prefill and the cost where it is resident: no price for living there, it does."""
        replica = resident.replica
        wait_s, prefill_s = self._seconds(replica, resident, request, now)
        running, arrivals = cost.requests(replica, now), self._arrivals(replica, now)
        return wait_s, prefill_s, sum(self._parts(replica, wait_s, prefill_s, running, arrivals))

    def _parts(
        self, replica: Replica, wait_s: float, prefill_s: float, running: float, arrivals: float
    ) -> tuple[float, ...]:
        """The terms of the cost: queue, prefill, neighbours, arrivals, spread. As `_costs` has them."""
        config = self.config
        added_s = prefill_s - (replica.speed.overhead_s if replica.pending else 0.0)
        return (
            wait_s,
            prefill_s,
            config.beta * replica.speed.decode[2] * running * added_s,
            config.gamma * arrivals * added_s * (added_s + 2.0 * wait_s),
            config.spread_s * running,
        )

    def _arrivals(self, replica: Replica, now: float) -> float:
        """Its arrivals a second over twice its idle share, as in `Field.arrivals`."""
        rates = self._rates.get(replica)
        return rates.delay(self.config.rate_tau_s, now) if rates is not None else 0.0

    def _costs(self, selection: Selection, request: Request, now: float) -> Vector:
        """Seconds in each place, none of the prompt being resident. Never NaN; infinite where none may go."""
        config, field = self.config, self._field
        field.bring_up(now)
        wait = field.ends - now
        np.maximum(wait, 0.0, out=wait)
        wait += field.others
        costs: Vector = field.factor * unit_prefill_s(max(0, request.prompt_tokens), 0)
        added = costs - field.opened
        costs += wait
        stall = field.stall if config.beta == 1.0 else config.beta * field.stall  # 1 by default: a pass less
        neighbours = stall * field.running
        neighbours *= added
        costs += neighbours
        wait *= 2.0
        wait += added
        wait *= added
        wait *= field.arrivals
        wait *= config.gamma
        costs += wait
        costs += config.theta_s * field.crowding
        if config.spread_s:
            costs += config.spread_s * field.running
        if slow_start.some_start(selection, config.slow_start_s, now):
            costs += slow_start.extra_s(selection, config.slow_start_s, now)
        costs[selection.shut] = np.inf
        return costs

    def _newborn(self, incumbent: Resident, now: float) -> NDArray[np.bool_]:
        """Scale-out moves nobody: replicas that joined lately are for those who have no KV to lose."""
        grace_s = self.config.grace_s
        # Younger than the incumbent by more than the time in which a fleet starts.
        mask: NDArray[np.bool_] = self._field.born > max(now - grace_s, incumbent.replica.since + 0.1 * grace_s)
        return mask

    # What is answered

    def _place(self, request: Request, candidates: Sequence[Replica], now: float) -> Choice:
        """Nothing of the prompt is resident anywhere: the least seconds, ties by rendezvous."""
        field = self._field
        costs = self._costs(self._over(candidates, now), request, now)
        least = costs.min()
        near = [field.replica(place) for place in np.flatnonzero(costs <= least + TIE_S).tolist()]
        if request.key is None:
            # Nobody will come back to it: among equals the one left longest.
            replica = min(near, key=lambda r: (cost.requests(r, now), r.last_lease, r.id))
            return self._choice(replica, Reason.NO_SESSION, request, now)
        home = request.last_home
        if home is not None and costs[field.place(home)] <= least + self.config.hysteresis_s:
            # A session that begins anew (compacted, or a client without history): the tools may still be there.
            return self._choice(home, Reason.HOME, request, now)
        replica = near[0] if len(near) == 1 else rendezvous(request.key, near)
        known = Reason.EVICTED if request.once_tokens else Reason.NEW
        reason = Reason.HOME_LOST if request.lost else known
        return self._choice(replica, reason, request, now)

    def _choice(self, replica: Replica, reason: Reason, request: Request, now: float) -> Choice:
        """A new placement."""
        wait_s, prefill_s = self._seconds(replica, None, request, now)
        return Choice(replica, reason, wait_s, 0, prefill_s)

    def _terms(
        self,
        replica: Replica,
        selection: Selection,
        resident: Resident | None,
        request: Request,
        now: float,
        barred: str,
    ) -> Candidate:
        """The cost of one candidate, term by term; infinite when it is `barred`, for the reason given."""
        wait_s, prefill_s = self._seconds(replica, resident, request, now)
        if resident is None:  # as in _costs
            field = self._field
            i = field.place(replica)
            wait_s = max(0.0, float(field.ends[i]) - now) + float(field.others[i])
            running, lam = float(field.running[i]), float(field.arrivals[i])
            crowding = self.config.theta_s * float(field.crowding[i])
            start = float(slow_start.extra_s(selection, self.config.slow_start_s, now)[i])
        else:  # as in _resident_s
            start = 0.0
            running, lam, crowding = float(cost.requests(replica, now)), self._arrivals(replica, now), 0.0
        queue, prefill, neighbours, arrivals, spread = self._parts(replica, wait_s, prefill_s, running, lam)
        terms = {
            "queue": queue,
            "prefill": prefill,
            "neighbours": neighbours,
            "arrivals": arrivals,
            "crowding": crowding,
            "spread": spread,
            "start": start,
        }
        if barred:
            terms[barred] = inf
        return Candidate(replica, sum(terms.values()), terms)

    # What it learns

    def observe(self, event: Event) -> None:
        if isinstance(event, LoadReported):
            self._field.reported(event.replica, event.at)
        elif isinstance(event, Routed):
            replica, seconds = event.choice.replica, event.choice.prefill_s
            if replica.pending > 1:  # it joins the pass of what waits
                seconds = max(0.0, seconds - replica.speed.overhead_s)
            self._sent(replica, seconds, event.at)
        elif isinstance(event, RoutedElsewhere):
            self._sent(event.replica, event.prefill_s, event.at)
        elif isinstance(event, _OF_THE_FLEET):
            self._fleet_changed = True
            if isinstance(event, ReplicaAdded):
                self._field.add(event.replica, event.at)
            elif isinstance(event, ReplicaRemoved):
                self._field.remove(event.replica)
                self._rates.pop(event.replica, None)
            else:
                self._field.settled(event.replica, event.at)
        else:
            self._field.changed(event.replica, event.at)

    def _sent(self, replica: Replica, prefill_s: float, now: float) -> None:
        rates = self._rates.get(replica)
        if rates is None:
            rates = self._rates[replica] = Rates()
        rates.add(prefill_s, self.config.rate_tau_s, now)
        self._field.changed(replica, now)

    def _over(self, candidates: Sequence[Replica], now: float) -> Selection:
        """These candidates among all."""
        selection = self._selection
        if selection is not None and selection.candidates is candidates:
            return selection
        for replica in candidates:  # who was not told of the fleet can choose all the same
            self._field.add(replica, now)
        made = Selection(self._field, candidates)
        # What failed requests leave of the candidates is asked for once: no reason to forget the whole of them.
        if selection is None or self._fleet_changed or len(candidates) > len(selection.candidates):
            self._selection = made
            self._fleet_changed = False
        return made

    def snapshot(self) -> Snapshot:
        snapshot = super().snapshot()
        snapshot.state = {
            replica.id: {"arrivals_per_s": round(rates.arrivals, 4), "prefill_share": round(rates.busy, 4)}
            for replica, rates in self._rates.items()
        }
        return snapshot
