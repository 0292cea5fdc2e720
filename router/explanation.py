"""A choice for people: as a table, and in one sentence."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

from policies.types import Candidate, Choice, Reason, Request
from router.decisions import Decision, home_left
from router.units import seconds

WORDS = {
    "queue": "queue",
    "wait": "queue",
    "room": "waiting for KV memory",
    "neighbours": "waiting of its neighbours",
    "arrivals": "waiting of those to come",
}
"""Terms of a cost whose own names say less."""

NAMED = 2
"""Terms named on either side of a comparison."""

PLACED = {
    Reason.NEW: "nothing is known of it",
    Reason.EVICTED: "its KV cache is believed to be gone from every replica",
    Reason.HOME_LOST: "its home cannot take it",
    Reason.NO_SESSION: "nothing tells whose request it is, so that load decides",
    Reason.HASH: "by its key alone",
    Reason.SPILLED: "where its key or prefix leads there is too much to do",
    Reason.SCORE: "the best sum of what its policy weighs",
    Reason.ROTATION: "whose turn it is",
    Reason.RANDOM: "by lot",
    Reason.LEAST_LOADED: "which has the fewest requests in flight",
}


def table(choice: Choice, request: Request) -> dict[str, Any]:
    """The choice, what was expected of it, and the candidates weighed, the least cost first. Fit for JSON."""
    held = {resident.replica: min(resident.tokens, request.prompt_tokens) for resident in request.residents}
    return {
        "session": None if request.key is None else request.key.hex(),
        "prompt_tokens": request.prompt_tokens,
        "replica": choice.replica.id,
        "reason": choice.reason,
        "sentence": sentence(choice, request),
        "resident_tokens": choice.resident_tokens,
        "wait_s": _rounded(choice.wait_s),
        "prefill_s": _rounded(choice.prefill_s),
        "unit": choice.unit,
        "candidates": [
            {
                "replica": each.replica.id,
                "cost": _rounded(each.cost),
                "terms": {name: _rounded(value) for name, value in each.terms.items()},
                "resident_tokens": held.get(each.replica, 0),
            }
            for each in sorted(choice.candidates, key=lambda each: each.cost)
        ],
    }


def sentence(choice: Choice, request: Request) -> str:
    """Why that replica, in words. Both as `Balancer.explain` left them."""
    chosen, reason = choice.replica, choice.reason
    if request.issuer is chosen:
        return f"goes to {chosen.id}: the response that it goes on from is there alone"
    if reason is Reason.HOME:
        return f"stays on {chosen.id}: {_staying(choice, request)}"
    if reason in (Reason.MOVED, Reason.SPLIT):
        return _moving(choice, request)
    if reason is Reason.PREFIX:
        held = f"{choice.resident_tokens} of {request.prompt_tokens} tokens"
        return f"goes to {chosen.id}: the longest part of its prompt is there, {held}"
    return f"goes to {chosen.id}: {PLACED[reason]}{_compared(choice)}"


def recalled(decision: Decision, anew_s: float | None) -> str:
    """Why a decision of the past was made, from what is remembered of it: no other replica's costs are.

    `anew_s`: seconds of prefill where nothing of the prompt is in the KV cache; None: not known any more.
    """
    if not decision.replica:
        return f"refused: {decision.reason}"
    reason = Reason(decision.reason)
    there = _expected(decision.wait_s, decision.prefill_s)
    if reason is Reason.HOME:
        without = "" if anew_s is None else f", {seconds(anew_s)} without its cache"
        return f"stays on {decision.replica}: {there}{without}"
    if reason in (Reason.MOVED, Reason.SPLIT):
        verb = "moves" if reason is Reason.MOVED else "splits off"
        left = f" from {decision.left}" if decision.left else ""
        return f"{verb}{left} to {decision.replica}: {there}"
    if reason is Reason.PREFIX:
        held = f"{decision.resident_tokens} of {decision.prompt_tokens} tokens"
        return f"goes to {decision.replica}: the longest part of its prompt is there, {held}"
    return f"goes to {decision.replica}: {PLACED[reason]}; {there}"


def _staying(choice: Choice, request: Request) -> str:
    own, others = _split(choice)
    if own is None:
        return f"its KV cache is there, {choice.resident_tokens} of {request.prompt_tokens} tokens"
    if not others:
        return "no other was weighed"
    best = others[0]
    costs, saves = _differences(own, best)
    text = f"moving would cost {costs or 'nothing'} {f'to save {saves}' if saves else 'and save nothing'}"
    return f"{text}, not enough to leave its cache" if best.cost < own.cost else text


def _moving(choice: Choice, request: Request) -> str:
    home = home_left(request, choice.replica)
    start = "moves" if choice.reason is Reason.MOVED else "splits off"
    if home is not None:
        start += f" from {home.replica.id}"
    start += f" to {choice.replica.id}"
    if choice.reason is Reason.SPLIT:
        start += ", others of its session being under way"
    own, others = _split(choice)
    left = next((each for each in others if home is not None and each.replica is home.replica), None)
    if own is None or left is None:
        return f"{start}: {_expected(choice.wait_s, choice.prefill_s)}"
    saves, costs = _differences(own, left)
    if not saves:
        return f"{start}: it saves nothing worth naming"
    return f"{start}: it costs {costs or 'nothing'} to save {saves}"


def _compared(choice: Choice) -> str:
    """What the chosen one costs, and the next best; nothing where the policy weighed none."""
    own, others = _split(choice)
    if own is None or choice.reason is Reason.NO_SESSION:
        return ""
    unit = f" {choice.unit}" if choice.unit else ""
    told = f"; {own.cost:.2f}{unit} there"
    return f"{told}, {others[0].cost:.2f}{unit} on {others[0].replica.id}" if others else told


def _split(choice: Choice) -> tuple[Candidate | None, list[Candidate]]:
    """The chosen candidate, and the others that could have been, the least cost first."""
    own = next((each for each in choice.candidates if each.replica is choice.replica), None)
    others = [each for each in choice.candidates if each.replica is not choice.replica and isfinite(each.cost)]
    return own, sorted(others, key=lambda each: each.cost)


def _differences(here: Candidate, there: Candidate) -> tuple[str, str]:
    """What `there` costs more, and what it costs less, in words; empty where it is nothing."""
    names = here.terms | there.terms
    more = {name: there.terms.get(name, 0.0) - here.terms.get(name, 0.0) for name in names}
    least = max(1e-3, 0.05 * max(map(abs, more.values()), default=0.0))
    return _listed(more, least), _listed({name: -value for name, value in more.items()}, least)


def _listed(terms: Mapping[str, float], least: float) -> str:
    """The largest terms that are at least `least` seconds."""
    largest = sorted(((value, name) for name, value in terms.items() if value >= least), reverse=True)[:NAMED]
    return " and ".join(f"{seconds(value)} of {WORDS.get(name, name)}" for value, name in largest)


def _expected(wait_s: float, prefill_s: float) -> str:
    return f"{seconds(wait_s)} of queue and {seconds(prefill_s)} of prefill there"


def _rounded(value: float) -> float | None:
    """None for what JSON cannot hold: the infinite cost of a replica that may not be chosen."""
    return round(value, 4) if isfinite(value) else None
