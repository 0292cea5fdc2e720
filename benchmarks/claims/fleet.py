"""Claims about many sessions on many replicas: hashing, even load, scale-out, cold prefills."""

from __future__ import annotations

from math import exp, factorial

from benchmarks.claims.claim import Claim, Line, times
from benchmarks.claims.play import AFFINITY, HASH, Run, Setting, find, measure, values
from benchmarks.fill import REPLICAS, SESSIONS, place
from sim.jobs import Candidate
from sim.results import estimate

RING = Candidate("consistent_hash")
EVEN = Candidate("session_affinity", {"spread_s": 1.0})
EVENER = Candidate("session_affinity", {"spread_s": 3.0})


def hashing(setting: Setting) -> Claim:
    """Row 9a: independent sessions, and nothing but where they are put."""
    sets = {seed: [place("rendezvous", 1000 * seed + n) for n in range(20)] for seed in setting.seeds}
    counts = {seed: [count for fill in fills for count in fill] for seed, fills in sets.items()}
    mean = SESSIONS / REPLICAS
    poisson = [exp(-mean) * mean**k / factorial(k) for k in range(12)]
    few = estimate([sum(count <= 1 for count in each) / len(each) for each in counts.values()])
    many = estimate([sum(count >= 12 for count in each) / len(each) for each in counts.values()])
    spread = estimate([sum((count - mean) ** 2 for count in each) / len(each) / mean for each in counts.values()])
    lines = [
        Line("replicas with at most 1 session", f"4 % (Poisson {sum(poisson[:2]):.3f})", few, 0.032, 0.048),
        Line("replicas with at least 12", f"0.5 % (Poisson {1 - sum(poisson):.4f})", many, 0.003, 0.008),
        Line("variance of sessions over their mean", "1", spread, 0.9, 1.1),
    ]
    return Claim("hashing: the arithmetic of hashing 250 sessions to 50 replicas (row 9a)", lines)


def even(setting: Setting) -> Claim:
    """Rows 9, 10 and 10b."""
    runs = {
        "rendezvous, without forks": Run(find("claim-fleet", synthetic__forks__probability=0.0), HASH),
        "rendezvous": Run(find("claim-fleet"), HASH),
        "consistent_hash": Run(find("claim-fleet"), RING),
        "session_affinity": Run(find("claim-fleet"), AFFINITY),
        "session_affinity, spread_s=1": Run(find("claim-fleet"), EVEN),
        "session_affinity, spread_s=3": Run(find("claim-fleet"), EVENER),
    }
    found = measure(setting, runs)

    def of(name: str, key: str) -> list[float]:
        return values(found[name], key)

    dispersion = {name: estimate(of(name, "inflight_dispersion")) for name in runs}
    after = "session_affinity, spread_s=1"
    lines = [
        Line(
            "variance / mean of requests in flight: hash",
            "several times the mean",
            dispersion["rendezvous"],
            2.0,
            9.0,
            1.0,
        ),
        Line("the same, without forks", "1", dispersion["rendezvous, without forks"], 0.8, 1.2),
        Line("session_affinity", "under 0.5", dispersion["session_affinity"], 0.0, 0.5, 1.0),
        Line(after, "under 0.5", dispersion[after], 0.0, 0.5, 1.0),
        Line(
            "TTFT p99, session_affinity over hash",
            "substantially more stable",
            times(of("session_affinity", "ttft_p99_s"), of("rendezvous", "ttft_p99_s")),
            0.0,
            0.8,
            1.0,
        ),
        Line("hit rate, session_affinity", "0.90 to 0.99", estimate(of("session_affinity", "hit_total")), 0.9, 0.99),
        Line(f"hit rate, {after}", "0.90 to 0.99", estimate(of(after, "hit_total")), 0.9, 0.99),
    ]
    keys = {
        "running on a replica": "running_mean",
        "variance / mean": "inflight_dispersion",
        "fullest / mean": "inflight_max_over_mean",
        "TTFT p50, s": "ttft_p50_s",
        "TTFT p99, s": "ttft_p99_s",
        "tokens/s": "tokens_per_s",
        "hit rate": "hit_total",
        "computed again": "again_share",
    }
    details = [["", *keys], *([name, *(str(estimate(of(name, key))) for key in keys.values())] for name in runs)]
    return Claim("even: 250 sessions on 50 replicas (rows 9, 10 and 10b)", lines, details)


def scaleout(setting: Setting) -> Claim:
    """Rows 9 and 10a: who loses its KV when replicas join."""
    candidates = {"rendezvous": HASH, "consistent_hash": RING, "session_affinity": AFFINITY}
    runs = {name: Run(find("claim-scaleout"), each) for name, each in candidates.items()}
    runs["rendezvous, without forks"] = Run(find("claim-scaleout", synthetic__forks__probability=0.0), HASH)
    found = measure(setting, runs)
    moved = {
        name: estimate([row["kv_lost_moves"] / (row["resident_sessions"] or 1) for row in rows])
        for name, rows in found.items()
    }
    lines = [
        Line(f"sessions that lose their KV: {name}", "remapped, 1 in 6", moved[name], 0.13, 0.2, 0.0)
        for name in ("rendezvous", "rendezvous, without forks", "consistent_hash")
    ]
    lines.append(Line("session_affinity", "only some, by load", moved["session_affinity"], 0.0, 0.05))
    keys = {
        "resident sessions": "resident_sessions",
        "of them lost": "kv_lost_moves",
        "to a new replica": "kv_lost_moves_to_new",
        "TTFT p99, s": "ttft_p99_s",
        "variance / mean": "inflight_dispersion",
    }
    details = [["", *keys]]
    details += [[name, *(str(estimate(values(rows, key))) for key in keys.values())] for name, rows in found.items()]
    return Claim("scaleout: 50 replicas become 60 (rows 9 and 10a)", lines, details)


SIZES = (1, 4, 16, 50)


def growth(setting: Setting) -> Claim:
    """Row 10: whether a replica of a large fleet does as much as one alone."""
    candidates = {"rendezvous": HASH, "session_affinity": AFFINITY}
    runs = {
        f"{name}/{size}": Run(find("claim-fleet", fleet__count=size), each)
        for name, each in candidates.items()
        for size in SIZES
    }
    found = measure(setting, runs)

    def each(name: str, size: int) -> list[float]:
        """Tokens/s of a replica."""
        return [value / size for value in values(found[f"{name}/{size}"], "tokens_per_s")]

    large, small = SIZES[-1], SIZES[1]
    kept = times(each("session_affinity", large), each("session_affinity", small))
    less = times(each("rendezvous", large), each("session_affinity", large))
    lines = [
        Line(f"tokens/s of a replica of {large} over one of {small}: session_affinity", "close to 1", kept, 0.9, 1.1),
        Line(f"tokens/s of a replica of {large}: rendezvous over session_affinity", "less", less, 0.0, 0.97, 1.0),
    ]
    details = [["replicas", *(f"{name}: {what}" for name in candidates for what in ("tokens/s each", "TTFT p99, s"))]]
    for size in SIZES:
        row = [str(size)]
        for name in candidates:
            waits = values(found[f"{name}/{size}"], "ttft_p99_s")
            row += [str(estimate(each(name, size))), str(estimate(waits))]
        details.append(row)
    return Claim("growth: throughput of a replica as the fleet grows (row 10)", lines, details)
