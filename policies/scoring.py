"""What several policies have in common: weights, draws, what follows from a share held, what an explanation shows."""

from __future__ import annotations

from collections.abc import Sequence

from policies import cost
from policies.hashing import uniform
from policies.types import Candidate, Choice, Replica, Request, Resident

SHOWN = 5
"""Candidates that an explanation shows."""


def weighted(candidates: Sequence[Replica]) -> Sequence[Replica]:
    """Those that have weight; all of them when none has: a replica without weight is the last resort."""
    for replica in candidates:
        if replica.weight <= 0.0:
            return [r for r in candidates if r.weight > 0.0] or candidates
    return candidates


def believing(choice: Choice, request: Request, share: float) -> Choice:
    """Complete the choice with what follows from holding a `share`, from 0 to 1, of the prompt."""
    prompt = max(0, request.prompt_tokens)
    held = choice.resident_tokens = min(int(share * prompt), prompt)
    choice.prefill_s = cost.prefill(choice.replica, prompt, Resident(choice.replica, held, held))
    return choice


def draw(number: int, seed: str) -> float:
    """A number in (0, 1): the `number`th of the seed's. Chance that can be repeated."""
    return uniform(number.to_bytes(8, "big"), seed)


def shortlist(weighed: Sequence[Candidate], chosen: Replica, most: int = SHOWN) -> tuple[Candidate, ...]:
    """The few with the least cost, the chosen one among them."""
    ranked = sorted(weighed, key=lambda candidate: candidate.cost)
    best = ranked[:most]
    if all(candidate.replica is not chosen for candidate in best):
        best[-1] = next(candidate for candidate in ranked if candidate.replica is chosen)
    return tuple(best)
