"""A session stays where its KV cache is, for as long as that is worth more than the wait there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from policies import cost, room, slow_start
from policies.events import Event, LoadReported, ReplicaAdded, ReplicaChanged, ReplicaRemoved, Routed, RoutedElsewhere
from policies.field import Field, Vector
from policies.hashing import rendezvous
from policies.policy import Policy
from policies.rates import Rates
from policies.scoring import shortlist
from policies.selection import Selection
from policies.speed import unit_prefill_s
from policies.types import Candidate, Choice, Needs, Reason, Replica, Request, Resident, Snapshot

EXPLAINED: Final = 8
"""Candidates shown by `explain`, the chosen one among them."""

_OF_THE_FLEET = (ReplicaAdded, ReplicaRemoved, ReplicaChanged)

TIE_S: Final = 1e-3
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

        w + room + pre + beta * stall * b * add + gamma * lam / (2 (1 - rho)) * (add^2 + 2 add w) + spread * b

    seconds: `w` until the prefills before it are done, `room` until its KV fits beside that of those who run, `pre` to
    prefill what is not resident there; `add`, which is `pre` without the overhead of a pass when it joins the pass of
    others that wait, for each of `b` neighbours whose decoding rests meanwhile, and what it delays those to come (the
    value function of an M/G/1 queue: Hyytia, Penttinen and Aalto, EJOR 217, 2012; `lam` arrivals a second, `rho` the
    share of time spent in prefill). `room` is no work, so it does not make a prefill dearer for those to come.

    Where nothing of the session is resident, theta * (live tokens / capacity) is added: what living there will cost.
    The session stays with the replica that holds it until another is better by the hysteresis.
    """

    name = "session_affinity"
    needs = Needs.SESSION | Needs.FINGERPRINT | Needs.BLOCKS
    Config = SessionAffinityConfig

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self._rates: dict[Replica, Rates] = {}
        config = self.config
        self._field = Field(
            self._rates,
            tau_s=config.rate_tau_s,
            beta=config.beta,
            gamma=config.gamma,
            theta_s=config.theta_s,
            spread_s=config.spread_s,
        )
        self._selection: Selection | None = None
        self._fleet_changed = False

    def pick(self, request: Request, candidates: Sequence[Replica], now: float) -> Choice:
        residents = request.residents
        if not residents:
            return self._place(request, candidates, now)
        incumbent = residents[0] if len(residents) == 1 else self._incumbent(request)
        prompt = request.prompt_tokens if request.prompt_tokens > 0 else 0
        wait_s, prefill_s, stay_s = self._resident_s(incumbent, prompt, now)
        selection = self._over(candidates, now)
        # No other can cost less than a full prefill at the fleet's best speed, or than what holds it, too.
        bound_s = self._field.least_factor * unit_prefill_s(prompt, 0)
        for other in residents:
            if other is not incumbent:
                bound_s = min(bound_s, self._resident_s(other, prompt, now)[2])
        if stay_s > bound_s + self.config.hysteresis_s:
            better = self._better(request, incumbent, stay_s, selection, now)
            if better is not None:
                return better
        tokens = incumbent.tokens
        return Choice(incumbent.replica, Reason.HOME, wait_s, tokens if tokens < prompt else prompt, prefill_s)

    def _better(
        self, request: Request, incumbent: Resident, stay_s: float, selection: Selection, now: float
    ) -> Choice | None:
        """The choice of another replica, if it costs less than `stay_s` by more than the hysteresis."""
        field, prompt = self._field, max(0, request.prompt_tokens)
        costs = self._costs(selection, prompt, now)
        costs[self._newborn(incumbent, now)] = np.inf
        for other in request.residents:
            costs[field.place(other.replica)] = self._resident_s(other, prompt, now)[2]
        least = selection.least(costs)
        if stay_s <= costs[least] + self.config.hysteresis_s:
            return None
        best = field.replica(least)
        reason = Reason.SPLIT if request.concurrent else Reason.MOVED
        for other in request.residents:
            if other.replica is best:
                wait_s, prefill_s, _ = self._resident_s(other, prompt, now)
                return Choice(best, reason, wait_s, min(other.tokens, prompt), prefill_s)
        return self._choice(best, reason, prompt, now)

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

    def _resident_s(self, resident: Resident, prompt: int, now: float) -> tuple[float, float, float]:
        """The wait, the prefill and the cost where it is resident: no price for living there, it does."""
        replica, config = resident.replica, self.config
        wait_s = cost.expected_wait(replica, now)
        room_s = room.wait_s(replica, prompt, now)
        prefill_s = cost.prefill(replica, prompt, resident)
        added_s = prefill_s - replica.speed.overhead_s if replica.pending else prefill_s
        running = cost.requests(replica, now)
        arrivals = self._arrivals(replica, now)
        rate = config.beta * replica.speed.decode[2] * running + arrivals * (added_s + 2.0 * wait_s)
        waits_s = wait_s + room_s
        return waits_s, prefill_s, waits_s + prefill_s + added_s * rate + config.spread_s * running

    def _arrivals(self, replica: Replica, now: float) -> float:
        """As `Field.arrivals`, of this moment."""
        rates = self._rates.get(replica)
        return self.config.gamma * rates.delay(self.config.rate_tau_s, now) if rates is not None else 0.0

    def _costs(self, selection: Selection, prompt: int, now: float) -> Vector:
        """Seconds in each place, none of the prompt being resident. Never NaN; infinite where none may go."""
        field = self._field
        field.bring_up(now)
        added = field.factor * unit_prefill_s(prompt, 0)
        added -= field.opened
        costs: Vector = field.ends - now
        np.maximum(costs, 0.0, out=costs)
        costs += field.others
        # added * (rate + arrivals * (added + 2 * wait)) + wait + fixed: the terms in the docstring, put together.
        worse = costs + costs
        worse += added
        worse *= field.arrivals
        worse += field.rate
        worse *= added
        costs += worse
        costs += field.fixed
        over = prompt - field.free
        if over.item(over.argmax()) > 0.0:  # as in room.wait_s
            running = field.running
            share = np.maximum(over / field.gpu, 1.0 / np.maximum(running, 1.0))
            costs += field.answer * share * ((over > 0.0) & (running > 0.0))
        slow_start_s = self.config.slow_start_s
        if slow_start.some_start(selection, slow_start_s, now):
            costs += slow_start.extra_s(selection, slow_start_s, now)
        costs += selection.shut
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
        field, prompt = self._field, request.prompt_tokens if request.prompt_tokens > 0 else 0
        costs = self._costs(self._over(candidates, now), prompt, now)
        least: float = costs.item(costs.argmin())
        near = [field.replica(place) for place in (costs <= least + TIE_S).nonzero()[0].tolist()]
        if request.key is None:
            return self._choice(_left_longest(near, now), Reason.NO_SESSION, prompt, now)
        home = request.last_home
        if home is not None and costs[field.place(home)] <= least + self.config.hysteresis_s:
            # A session that begins anew (compacted, or a client without history): the tools may still be there.
            return self._choice(home, Reason.HOME, prompt, now)
        replica = near[0] if len(near) == 1 else rendezvous(request.key, near)
        known = Reason.EVICTED if request.once_tokens else Reason.NEW
        reason = Reason.HOME_LOST if request.lost else known
        return self._choice(replica, reason, prompt, now)

    def _choice(self, replica: Replica, reason: Reason, prompt: int, now: float) -> Choice:
        """A new placement."""
        wait_s = cost.expected_wait(replica, now) + room.wait_s(replica, prompt, now)
        return Choice(replica, reason, wait_s, 0, replica.speed.prefill_s(prompt, 0))

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
        config, field = self.config, self._field
        prompt = max(0, request.prompt_tokens)
        prefill_s = cost.prefill(replica, prompt, resident)
        added_s = prefill_s - (replica.speed.overhead_s if replica.pending else 0.0)
        if resident is None:  # as in _costs
            i = field.place(replica)
            wait_s = max(0.0, float(field.ends[i]) - now) + float(field.others[i])
            running, arrivals, crowding = float(field.running[i]), float(field.arrivals[i]), float(field.crowding[i])
            start = float(slow_start.extra_s(selection, config.slow_start_s, now)[i])
        else:  # as in _resident_s
            wait_s, running = cost.expected_wait(replica, now), float(cost.requests(replica, now))
            arrivals = self._arrivals(replica, now)
            crowding = start = 0.0
        terms = {
            "queue": wait_s,
            "room": room.wait_s(replica, prompt, now),
            "prefill": prefill_s,
            "neighbours": config.beta * replica.speed.decode[2] * running * added_s,
            "arrivals": arrivals * added_s * (added_s + 2.0 * wait_s),
            "crowding": crowding,
            "spread": config.spread_s * running,
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


def _left_longest(near: Sequence[Replica], now: float) -> Replica:
    """Of those that cost the same, for a request that nobody will come back to."""
    return min(near, key=lambda r: (cost.requests(r, now), r.last_lease, r.id))
