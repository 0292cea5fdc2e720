"""What the admin port tells of several workers as of one router: the answer of one, with what the others have in it.

What each worker knows of the whole fleet is told as the one that answers knows it; what is under way is added up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from router.app import Router

Tree = dict[str, Any]

_ADDED = ("in_flight", "served", "pending_prefill_tokens", "awaiting_first_token")
"""Of a replica: each worker's own."""

_FLEET_ADDED = (
    "requests_per_s",
    "in_flight",
    "awaiting_first_token",
    "waiting",
    "held_sessions",
    "pending_prefill_tokens",
    "connections",
)
_FLEET_MOST = ("longest_wait_s", "resident_tokens", "capacity_tokens", "sessions", "sessions_limit")
"""Of the fleet in `/overview`: added up, and what each sees of the whole."""

_LEVELS = ("ok", "warn", "bad")


def loads_of(router: Router) -> Tree:
    """What a worker has under way: little enough to be told for any fleet at once."""
    return {
        "replicas": {
            each.id: {
                "in_flight": each.in_flight,
                "served": each.served,
                "pending_prefill_tokens": each.prefill_tokens,
                "awaiting_first_token": each.pending,
            }
            for each in router.balancer.replicas.values()
        },
        "leaving": [{"id": each.id, "in_flight": each.in_flight} for each in router.fleet.leaving],
    }


def replicas(told: Tree, others: Sequence[Tree], told_by_all: bool) -> Tree:
    """`/replicas` of one worker with the loads of the others, and whether those are all there are."""
    leaving = {each["id"]: each for each in told["leaving"]}
    for other in others:
        for each in other["leaving"]:
            known = leaving.setdefault(each["id"], {"id": each["id"], "url": None, "in_flight": 0})
            known["in_flight"] += each["in_flight"]
    loads = [other["replicas"] for other in others]
    described = [replica(each, loads, told_by_all) for each in told["replicas"]]
    return told | {"replicas": described, "leaving": [leaving[name] for name in sorted(leaving)]}


def replica(told: Tree, others: Iterable[Mapping[str, Tree]], told_by_all: bool) -> Tree:
    """One replica, as one worker describes it, with the loads of the others. No drain is over before all say so."""
    loads = [other[told["id"]] for other in others if told["id"] in other]
    out = told | {key: told[key] + sum(load[key] for load in loads) for key in _ADDED if key in told}
    seen = told["in_flight"] + told["others_in_flight"]  # the other workers' among them
    out["others_in_flight"] = max(0, seen - out["in_flight"])
    if told["drain"] is not None:
        elsewhere = out["in_flight"] - told["in_flight"]
        done = told["drain"]["done"] and not elsewhere and told_by_all
        out["drain"] = told["drain"] | {"in_flight": told["drain"]["in_flight"] + elsewhere, "done": done}
    return out


def overview(living: Mapping[int, Tree], loads: Sequence[Tree], told_by_all: bool, count: int, decisions: int) -> Tree:
    """`/overview` of the workers of `count` that serve, and so many of all their decisions.

    The first tells what all know; `loads` are of the others, `told_by_all` when none of them is missing.
    """
    told = next(iter(living.values()))
    by_replica = [load["replicas"] for load in loads]
    return told | {
        "uptime_s": max(each["uptime_s"] for each in living.values()),
        "verdict": _verdict({number: each["verdict"] for number, each in living.items()}, count),
        "fleet": _fleet([each["fleet"] for each in living.values()]),
        "store": _store({number: each["store"] for number, each in living.items()}),
        "draining": [replica(each, by_replica, told_by_all) for each in told["draining"]],
        "replicas": [replica(each, by_replica, told_by_all) for each in told["replicas"]],
        "decisions": _decisions([each["decisions"] for each in living.values()], decisions),
    }


def _verdict(verdicts: Mapping[int, Tree], count: int) -> Tree:
    """What all agree on; what only some see, as of one of them; and how many are missing."""
    levels = {number: _LEVELS.index(each["level"]) for number, each in verdicts.items()}
    worst = max(levels, key=lambda number: levels[number])
    level, text = verdicts[worst]["level"], verdicts[worst]["text"]
    if len(set(levels.values())) > 1:
        level, text = "warn", f"Worker {worst}: {text}"
    if missing := count - len(verdicts):
        text = f"{missing} of {count} workers {'does' if missing == 1 else 'do'} not answer. {text}"
        level = "warn" if level == "ok" else level
    return {"level": level, "text": text}


def _store(stores: Mapping[int, Tree]) -> Tree:
    """As one worker sees it, which is named: the first that does not reach it, if there is any."""
    worker = next((number for number, each in stores.items() if not each["up"]), next(iter(stores)))
    return stores[worker] | {"worker": worker}


def _fleet(fleets: list[Tree]) -> Tree:
    out = dict(fleets[0])
    for key in _FLEET_ADDED:
        out[key] = _sum(fleet[key] for fleet in fleets)
    for key in _FLEET_MOST:
        out[key] = max((fleet[key] for fleet in fleets if fleet[key] is not None), default=None)
    series = [fleet["requests_per_s_series"] for fleet in fleets]
    longest = max(map(len, series))
    padded = [[0.0] * (longest - len(each)) + each for each in series]
    out["requests_per_s_series"] = [round(sum(each), 2) for each in zip(*padded, strict=True)]
    out["hit_rate"] = _mean([(fleet["hit_rate"], fleet["requests_per_s"] or 0.0) for fleet in fleets])
    for key in ("regretted_tokens", "refusals"):
        names = dict.fromkeys(name for fleet in fleets for name in fleet[key])
        out[key] = {name: sum(fleet[key].get(name, 0) for fleet in fleets) for name in names}
    out["refusals"] = dict(sorted(out["refusals"].items(), key=lambda item: -item[1]))
    return out


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(sum(known), 4) if known else None


def _mean(weighed: list[tuple[float | None, float]]) -> float | None:
    """Of those that are known, by their weights."""
    known = [(value, weight) for value, weight in weighed if value is not None]
    total = sum(weight for _, weight in known)
    if not total:
        return max((value for value, _ in known), default=None)
    return round(sum(value * weight for value, weight in known) / total, 4)


def _decisions(told: list[list[Tree]], most: int) -> list[Tree]:
    """The latest of all, numbered so that no two have one number."""
    workers = len(told)
    found = [each | {"number": each["number"] * workers + at} for at, some in enumerate(told) for each in some]
    return sorted(found, key=lambda each: str(each["time"]), reverse=True)[:most]
