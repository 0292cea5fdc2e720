"""What a run is judged by. Keeps a few numbers of each request that is counted, and of open requests all."""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from hashlib import blake2b
from math import nan
from struct import Struct
from typing import Final

WINDOW_S: Final = 30.0
"""In-flight requests are averaged over so long before the fullest replica is compared with the mean."""

HISTORY_S: Final = 10.0
"""Between two entries of the history."""


class Served:
    """One turn's request, as its client and the fleet saw it. Times in seconds; None until it happened."""

    def __init__(
        self,
        name: str,
        arrived: float,
        main: bool,
        ideal_s: float,
        prompt_tokens: int,
        output_tokens: int,
        session: bytes | None = None,
    ) -> None:
        """`ideal_s` is the time to the first token on an idle replica that holds whatever was ever computed of it;
        `session` is the session's key, None where a conversation has none."""
        self.name = name
        self.session = session if session is not None else name.rpartition("#")[0].encode()
        self.arrived = arrived
        self.main = main
        self.ideal_s = ideal_s
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.replica = ""
        self.reason = ""
        self.moved = False
        """A turn of the main thread that went to another replica than the one before."""
        self.followed = False
        """A turn of the main thread that had one before."""
        self.cached_tokens = 0
        self.host_tokens = 0
        self.elsewhere_tokens = 0
        """Computed anew while another replica held them."""
        self.evicted_tokens = 0
        """Computed anew after they had been dropped everywhere."""
        self.tries = 0
        self.placed: float | None = None
        """When it was sent to a replica for the first time."""
        self.first_token: float | None = None
        self.finished: float | None = None
        self.left: float | None = None
        """When its client gave up waiting for the first token."""
        self.closed = False
        """Nothing more happens to it."""


@dataclass(slots=True)
class Joined:
    """At scale-outs: the first turn after one of each session whose KV was still resident where it was."""

    resident: int = 0
    to_new: int = 0
    """Of those, the ones sent to a new replica."""
    elsewhere: int = 0
    """Of those, the ones sent to any other replica, and losing more than half of their KV by it."""


def _floats() -> array[float]:
    return array("d")


@dataclass(slots=True)
class Tally:
    """Sums, and what percentiles need: four numbers a request."""

    start: float
    end: float
    requests: int = 0
    begun: int = 0
    followed: int = 0
    moved: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    host_tokens: int = 0
    elsewhere_tokens: int = 0
    evicted_tokens: int = 0
    ended_tokens: int = 0
    """Of prompts and answers of the requests that ended in the time measured."""
    waits: array[float] = field(default_factory=_floats)
    """Seconds to the first token. What has none counts with its age, so that a policy that starves requests does not
    look good, and what was given up with the client's patience."""
    excess: array[float] = field(default_factory=_floats)
    """The same beyond the ideal."""
    whole: array[float] = field(default_factory=_floats)
    """Seconds to the end."""
    steps: array[float] = field(default_factory=_floats)
    """Seconds between tokens, mean of each request."""
    placed_waits: array[float] = field(default_factory=_floats)
    """Seconds from a replica's being picked to the first token, of the requests for which that was done in the time
    measured: without what they waited to be let in."""
    let_in: array[float] = field(default_factory=_floats)
    """Seconds from the request until a replica was picked; of what was not let in, its age."""
    longest_s: float = 0.0
    """The longest of these in the whole run."""
    sessions: dict[bytes, list[float]] = field(default_factory=dict)
    """By session's key: when it asked first, when it was heard of last, the seconds of it that it waited to be let in,
    and how many of its requests were."""
    regret: Counter[str] = field(default_factory=Counter)
    """Tokens computed anew while another replica held them, by reason of the choice."""

    def add(self, s: Served) -> None:
        if s.finished is not None and self.start <= s.finished < self.end:
            self.ended_tokens += s.prompt_tokens + s.output_tokens
        until = s.left if s.left is not None else self.end
        first = s.first_token if s.first_token is not None else until
        let_in = s.placed if s.placed is not None else until
        if s.placed is not None and self.start <= s.placed < self.end:
            self.placed_waits.append(first - s.placed)
        self._add_session(s)
        self.longest_s = max(self.longest_s, let_in - s.arrived)
        if not self.start <= s.arrived < self.end:
            return
        self.requests += 1
        self.followed += s.followed
        self.moved += s.moved
        self.waits.append(first - s.arrived)
        self.let_in.append(let_in - s.arrived)
        self.excess.append(max(0.0, first - s.arrived - s.ideal_s))
        if s.first_token is None:
            return
        self.begun += 1
        self.prompt_tokens += s.prompt_tokens
        self.cached_tokens += s.cached_tokens
        self.host_tokens += s.host_tokens
        self.elsewhere_tokens += s.elsewhere_tokens
        self.evicted_tokens += s.evicted_tokens
        self.regret[s.reason] += s.elsewhere_tokens
        if s.finished is not None:
            self.whole.append(s.finished - s.arrived)
            if s.output_tokens > 1:
                self.steps.append((s.finished - s.first_token) / (s.output_tokens - 1))

    def _add_session(self, s: Served) -> None:
        """What it does to its session's standing in the time measured."""
        start, end = max(s.arrived, self.start), self.end
        for until in (s.finished, s.left):
            end = min(end, until) if until is not None else end
        if end <= start:
            return
        session = self.sessions.setdefault(s.session, [start, end, 0.0, 0.0])
        session[0], session[1] = min(session[0], start), max(session[1], end)
        session[2] += max(0.0, min(s.placed if s.placed is not None else end, end) - start)
        session[3] += s.placed is not None

    def standings(self) -> list[float]:
        """Of each session the share of its time in which it was not kept waiting to be let in."""
        return [1.0 - min(1.0, waited / (last - first)) for first, last, waited, _ in self.sessions.values()]


class Measure:
    """Collects from `start` to `end`, seconds; what is asked outside of that is not counted."""

    def __init__(self, start: float, end: float) -> None:
        self.start = start
        self.end = end
        self.keep = False
        """Keep every request in `served`, too. To be set before the run."""
        self.served: list[Served] = []
        self.joined = Joined()
        self.broken = 0
        """Answers that broke off."""
        self.refused = 0
        self.sheds: Counter[str] = Counter()
        """Refusals by admission, by reason."""
        self.abandoned = 0
        """Requests whose client left before the first token."""
        self.retracted = 0
        """Times that the engines there are have taken a request out of the batch for want of KV, at the last sample."""
        self.placed: Counter[str] = Counter()
        """Live sessions by the replica of their main thread's last turn, at the end."""
        self.history: list[tuple[float, dict[str, int]]] = []
        """Requests in flight by replica, every `HISTORY_S` of the whole run."""
        self._tally = Tally(start, end)
        self._open: deque[Served] = deque()
        """In order of arrival, from the first that is not closed on."""
        self._digest = blake2b(digest_size=8)
        self._samples = 0
        self._variance = 0.0
        self._mean = 0.0
        self._running = 0.0
        self._window: list[int] = []
        self._window_end = start
        self._ratios: list[float] = []

    def begin(self, served: Served) -> None:
        """A request arrives."""
        self._open.append(served)
        if self.keep:
            self.served.append(served)

    def close(self, served: Served) -> None:
        """Nothing more happens to a request."""
        served.closed = True
        while self._open and self._open[0].closed:
            done = self._open.popleft()
            self._tally.add(done)
            self._digest.update(_line(done))

    def remember(self, now: float, replicas: Iterable[str], in_flight: Iterable[int]) -> None:
        """Called as often as `sample`: requests in flight on each replica."""
        if not self.history or now >= self.history[-1][0] + HISTORY_S:
            self.history.append((now, dict(zip(replicas, in_flight, strict=True))))

    def sample(self, now: float, in_flight: Sequence[int], running: int) -> None:
        """Once a second: running and queued requests of every replica, and how many run in all.

        A moment at which there is no replica is not counted.
        """
        if not self.start <= now < self.end or not in_flight:
            return
        mean = sum(in_flight) / len(in_flight)
        self._samples += 1
        self._mean += mean
        self._running += running / len(in_flight)
        self._variance += sum([(count - mean) ** 2 for count in in_flight]) / len(in_flight)
        if now >= self._window_end or len(self._window) != len(in_flight):
            self._close_window()
            self._window = [0] * len(in_flight)
            self._window_end = now + WINDOW_S
        self._window = [total + count for total, count in zip(self._window, in_flight, strict=True)]

    def _close_window(self) -> None:
        if sum(self._window):
            self._ratios.append(max(self._window) * len(self._window) / sum(self._window))

    def tally(self) -> Tally:
        """Of all requests so far, open ones too."""
        tally = deepcopy(self._tally)
        for served in self._open:
            tally.add(served)
        return tally

    @property
    def waits(self) -> list[float]:
        """Seconds to the first token of every request counted, ascending."""
        return sorted(self.tally().waits)

    def result(self) -> dict[str, object]:
        """All figures, in seconds, tokens and shares of 1."""
        self._close_window()
        self._window = []
        tally = self.tally()
        waits, excess, whole, steps = (
            sorted(values) for values in (tally.waits, tally.excess, tally.whole, tally.steps)
        )
        placed, let_in, standings = sorted(tally.placed_waits), sorted(tally.let_in), tally.standings()
        prompt = tally.prompt_tokens or 1
        mean = self._mean / self._samples if self._samples else 0.0
        sessions = list(self.placed.values())
        return {
            "requests": tally.requests,
            "unserved": tally.requests - tally.begun,
            "broken": self.broken,
            "refused": self.refused,
            "abandoned": self.abandoned,
            "retracted": self.retracted,
            "ttft_p50_s": _round(percentile(waits, 0.5)),
            "ttft_p90_s": _round(percentile(waits, 0.9)),
            "ttft_p99_s": _round(percentile(waits, 0.99)),
            "ttft_mean_s": _round(_mean(waits)),
            "ttft_placed_p50_s": _round(percentile(placed, 0.5)),
            "ttft_placed_p99_s": _round(percentile(placed, 0.99)),
            "ttft_placed_mean_s": _round(_mean(placed)),
            "let_in_mean_s": _round(_mean(let_in)),
            "let_in_p99_s": _round(percentile(let_in, 0.99)),
            "let_in_longest_s": _round(tally.longest_s),
            "sheds": sum(self.sheds.values()),
            "sheds_by_reason": dict(sorted(self.sheds.items())),
            "sessions_served_share": _round(_mean([float(s[3] > 0) for s in tally.sessions.values()])),
            "sessions_fairness": _round(jain(standings)),
            "excess_mean_s": _round(_mean(excess)),
            "excess_p99_s": _round(percentile(excess, 0.99)),
            "e2e_p50_s": _round(percentile(whole, 0.5)),
            "e2e_p99_s": _round(percentile(whole, 0.99)),
            "tpot_p50_s": _round(percentile(steps, 0.5)),
            "tpot_p99_s": _round(percentile(steps, 0.99)),
            "tokens_per_s": round(tally.ended_tokens / (self.end - self.start)),
            "hit_gpu": _round((tally.cached_tokens - tally.host_tokens) / prompt),
            "hit_total": _round(tally.cached_tokens / prompt),
            "regretted_prefill_share": _round(tally.elsewhere_tokens / prompt),
            "evicted_prefill_share": _round(tally.evicted_tokens / prompt),
            "regretted_tokens_by_reason": dict(sorted(tally.regret.items())),
            "moved_share": _round(tally.moved / (tally.followed or 1)),
            "inflight_mean": _round(mean),
            "running_mean": _round(self._running / self._samples if self._samples else 0.0),
            "inflight_dispersion": _round(self._variance / self._samples / mean if mean else 0.0),
            "inflight_max_over_mean": _round(_mean(self._ratios)),
            "sessions_max_over_mean": _round(max(sessions) * len(sessions) / sum(sessions) if any(sessions) else 0.0),
            "resident_sessions": self.joined.resident,
            "kv_lost_moves": self.joined.elsewhere,
            "kv_lost_moves_to_new": self.joined.to_new,
            "digest": self.digest(),
        }

    def digest(self) -> str:
        """Of every request's way: equal runs have equal digests."""
        digest = self._digest.copy()
        for served in self._open:
            digest.update(_line(served))
        return digest.hexdigest()


_TIMES = Struct("<3d")


def _line(s: Served) -> bytes:
    """A request's way, to the last bit; what did not happen is not a number."""
    first_token = s.first_token if s.first_token is not None else nan
    finished = s.finished if s.finished is not None else nan
    return f"{s.name} {s.replica}\n".encode() + _TIMES.pack(s.arrived, first_token, finished)


def percentile(ascending: Sequence[float], share: float) -> float:
    """Of sorted values, interpolated; 0 when there is none."""
    if not ascending:
        return 0.0
    at = share * (len(ascending) - 1)
    low = int(at)
    high = min(low + 1, len(ascending) - 1)
    return ascending[low] + (at - low) * (ascending[high] - ascending[low])


def jain(values: Sequence[float]) -> float:
    """Jain's fairness index (DEC-TR-301, 1984): 1 when all are equal, 1/n when one of n has all; 1 of nothing."""
    squares = sum([value * value for value in values])
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _round(value: float) -> float:
    return round(value, 4)
