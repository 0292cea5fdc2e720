"""What a run is judged by."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

WINDOW_S = 30.0
"""In-flight requests are averaged over so long before the fullest replica is compared with the mean."""


@dataclass(slots=True)
class Served:
    """One turn's request, as its client and the fleet saw it. Times in seconds; None until it happened."""

    name: str
    arrived: float
    main: bool
    ideal_s: float
    """Time to the first token on an idle replica that holds whatever was ever computed of it."""
    prompt_tokens: int
    output_tokens: int
    replica: str = ""
    reason: str = ""
    moved: bool = False
    """A turn of the main thread that went to another replica than the one before."""
    followed: bool = False
    """A turn of the main thread that had one before."""
    cached_tokens: int = 0
    host_tokens: int = 0
    elsewhere_tokens: int = 0
    """Computed anew while another replica held them."""
    evicted_tokens: int = 0
    """Computed anew after they had been dropped everywhere."""
    tries: int = 0
    first_token: float | None = None
    finished: float | None = None


@dataclass(slots=True)
class Joined:
    """At scale-outs: the first turn after one of each session whose KV was still resident where it was."""

    resident: int = 0
    to_new: int = 0
    """Of those, the ones sent to a new replica."""
    elsewhere: int = 0
    """Of those, the ones sent to any other replica, and losing more than half of their KV by it."""


class Measure:
    """Collects from `start` to `end`, seconds; what is asked outside of that is not counted."""

    def __init__(self, start: float, end: float) -> None:
        self.start = start
        self.end = end
        self.served: list[Served] = []
        self.joined = Joined()
        self.broken = 0
        """Answers that broke off."""
        self.refused = 0
        self.placed: Counter[str] = Counter()
        """Live sessions by the replica of their main thread's last turn, at the end."""
        self._samples = 0
        self._variance = 0.0
        self._mean = 0.0
        self._running = 0.0
        self._window: list[int] = []
        self._window_end = start
        self._ratios: list[float] = []

    def sample(self, now: float, in_flight: Sequence[int], running: int) -> None:
        """Once a second: running and queued requests of every replica, and how many run in all."""
        if not self.start <= now < self.end:
            return
        mean = sum(in_flight) / len(in_flight)
        self._samples += 1
        self._mean += mean
        self._running += running / len(in_flight)
        self._variance += sum((count - mean) ** 2 for count in in_flight) / len(in_flight)
        if now >= self._window_end or len(self._window) != len(in_flight):
            self._close_window()
            self._window = [0] * len(in_flight)
            self._window_end = now + WINDOW_S
        for i, count in enumerate(in_flight):
            self._window[i] += count

    def _close_window(self) -> None:
        if sum(self._window):
            self._ratios.append(max(self._window) * len(self._window) / sum(self._window))

    def result(self) -> dict[str, object]:
        """All figures, in seconds, tokens and shares of 1."""
        self._close_window()
        counted = [s for s in self.served if self.start <= s.arrived < self.end]
        # What has no first token yet counts with its age, so that a policy that starves requests does not look good.
        waits = sorted((s.first_token if s.first_token is not None else self.end) - s.arrived for s in counted)
        excess = sorted(
            max(0.0, (s.first_token if s.first_token is not None else self.end) - s.arrived - s.ideal_s)
            for s in counted
        )
        done = [s for s in counted if s.finished is not None]
        whole = sorted(s.finished - s.arrived for s in done if s.finished is not None)
        steps = sorted(
            (s.finished - s.first_token) / (s.output_tokens - 1)
            for s in done
            if s.finished is not None and s.first_token is not None and s.output_tokens > 1
        )
        begun = [s for s in counted if s.first_token is not None]
        prompt = sum(s.prompt_tokens for s in begun) or 1
        followed = sum(s.followed for s in counted) or 1
        ended = [s for s in self.served if s.finished is not None and self.start <= s.finished < self.end]
        tokens = sum(s.prompt_tokens + s.output_tokens for s in ended)
        cached, host = sum(s.cached_tokens for s in begun), sum(s.host_tokens for s in begun)
        elsewhere, evicted = sum(s.elsewhere_tokens for s in begun), sum(s.evicted_tokens for s in begun)
        regret: Counter[str] = Counter()
        for s in begun:
            regret[s.reason] += s.elsewhere_tokens
        mean = self._mean / self._samples if self._samples else 0.0
        sessions = list(self.placed.values())
        return {
            "requests": len(counted),
            "unserved": len(counted) - len(begun),
            "broken": self.broken,
            "refused": self.refused,
            "ttft_p50_s": _round(percentile(waits, 0.5)),
            "ttft_p90_s": _round(percentile(waits, 0.9)),
            "ttft_p99_s": _round(percentile(waits, 0.99)),
            "ttft_mean_s": _round(_mean(waits)),
            "excess_mean_s": _round(_mean(excess)),
            "excess_p99_s": _round(percentile(excess, 0.99)),
            "e2e_p50_s": _round(percentile(whole, 0.5)),
            "e2e_p99_s": _round(percentile(whole, 0.99)),
            "tpot_p50_s": _round(percentile(steps, 0.5)),
            "tpot_p99_s": _round(percentile(steps, 0.99)),
            "tokens_per_s": round(tokens / (self.end - self.start)),
            "hit_gpu": _round((cached - host) / prompt),
            "hit_total": _round(cached / prompt),
            "regretted_prefill_share": _round(elsewhere / prompt),
            "evicted_prefill_share": _round(evicted / prompt),
            "regretted_tokens_by_reason": dict(sorted(regret.items())),
            "moved_share": _round(sum(s.moved for s in counted) / followed),
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
        digest = blake2b(digest_size=8)
        for s in self.served:
            digest.update(f"{s.name} {s.arrived!r} {s.replica} {s.first_token!r} {s.finished!r}\n".encode())
        return digest.hexdigest()


def percentile(ascending: Sequence[float], share: float) -> float:
    """Of sorted values, interpolated; 0 when there is none."""
    if not ascending:
        return 0.0
    at = share * (len(ascending) - 1)
    low = int(at)
    high = min(low + 1, len(ascending) - 1)
    return ascending[low] + (at - low) * (ascending[high] - ascending[low])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _round(value: float) -> float:
    return round(value, 4)
