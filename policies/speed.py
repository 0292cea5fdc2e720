"""How long an engine takes, learned from what is seen of it.

Seconds to prefill n new tokens on p resident ones:

    factor * (OVERHEAD_S + n * PER_TOKEN_S + n * (p + n/2) * PER_PAIR_S)

the last term being attention of the new tokens over all before them. The constants are a fit of the tables in
sim/data/aic_kimi_b200 (Kimi K2.5, INT4 weights, BF16 KV, tensor parallel 4, B200), summed over chunks of 8,192 tokens;
their shape holds for other engines, and one factor for each replica is learned from requests that found it idle.
The placement study found a factor wrong by 1.5 to cost nothing measurable. The overhead is a pass's, not a prompt's: an
engine computes all that waits, up to a chunk, in one (SGLang, managers/schedule_policy.py, PrefillAdder).

Seconds between two tokens of an answer, with b requests in flight and s prefill seconds begun beside it a token:

    step_s + slope_s * b + stall * s

`stall` is the share of a neighbour's prefill for which decoding rests: 1 for SGLang without mixed chunks, which
prefills first, less with them.
"""

from __future__ import annotations

from math import exp, inf, log
from typing import Final

from policies.lag import Lag

OVERHEAD_S: Final = 0.054
PER_TOKEN_S: Final = 3.2e-5
PER_PAIR_S: Final = 9.5e-10

HOST_TOKENS_PER_S: Final = 700_000.0
"""KV tokens loaded back from the host tier: 50 GB/s for each rank over 70,272 bytes a token (same tables)."""

FACTOR_BOUNDS = (0.02, 500.0)
"""From far beyond any accelerator to a tiny model on a CPU."""

MIN_TOKENS: Final = 256
"""Fewer new tokens than this are mostly overhead, and the network's."""

LEAST_WEIGHT: Final = 0.1
"""Of the newest of many observations in the moving average of log(factor)."""

LEAST_ANSWER_WEIGHT: Final = 0.05
"""Of the newest of many answers in the mean of their seconds."""

MOST_STEP: Final = log(2.0)
"""By which one of them moves log(factor) at most: a first answer that was late because the engine warmed up would else
keep all requests away, from which better could be learned."""

REFERENCE_TOKENS: Final = 30_000.0
"""Context at which a speed told in tokens per second is taken to be meant."""

STEP_S: Final = 0.0046
SLOPE_S: Final = 0.001
STALL: Final = 1.0
"""Before anything is seen; same tables, at 100,000 tokens of context, 2.3 tokens a step."""
STEP_BOUNDS, SLOPE_BOUNDS, STALL_BOUNDS = (1e-4, 1.0), (0.0, 0.1), (0.25, 1.5)
MIN_COMPLETION: Final = 16
"""Shorter answers say little of the time between tokens."""
FORGETTING: Final = 0.99
"""Weight of what was known at each new observation: about the last hundred count."""
SOLVED_EVERY: Final = 16
"""Answers between two solutions, from the second sixteen on."""
_PRIOR_N: Final = 2.0
_PRIOR_BB: Final = 20.0
_PRIOR_SS: Final = 1e-5
"""How firmly each is held to its start: as by 2 answers, by 2 with a batch of 3, by 10 with a millisecond a token."""


def unit_prefill_s(new_tokens: float, prefix_tokens: float) -> float:
    """Seconds to prefill `new_tokens` behind `prefix_tokens` that are resident, at a factor of 1, overhead included."""
    return OVERHEAD_S + new_tokens * (PER_TOKEN_S + (prefix_tokens + 0.5 * new_tokens) * PER_PAIR_S)


class Speed:
    """Of one replica."""

    __slots__ = ("_sums", "answer_s", "answers", "decode", "decodes", "factor", "lag", "prefills", "slowness")

    def __init__(self) -> None:
        self.factor = 1.0
        """Of prefills that found it idle."""
        self.lag = Lag()
        self.slowness = 1.0
        """By how much it takes longer than that explains, where that is much more than its fleet does; else 1. Only
        `lag.judge` changes it."""
        self.prefills = 0
        """Prefills that were learned from."""
        self.decodes = 0
        """Answers that were learned from."""
        self.answers = 0
        """Answers whose length in seconds was seen."""
        self.answer_s = 0.0
        """Mean seconds from an answer's first token to its end, of the last ones; 0 before there is one."""
        self._sums = (0.0,) * 9
        self.decode = (STEP_S, SLOPE_S, STALL)
        """`step_s`, `slope_s` and `stall` as learned, each within its bounds."""

    @property
    def pace(self) -> float:
        """What seconds of prefill are multiplied by."""
        return self.factor * self.slowness

    @property
    def overhead_s(self) -> float:
        """Seconds of a prefill pass, however little is computed in it."""
        return self.factor * self.slowness * OVERHEAD_S

    def prefill_s(self, new_tokens: float, prefix_tokens: float) -> float:
        """Seconds to prefill `new_tokens` behind `prefix_tokens` that are resident, in a pass of its own."""
        return self.factor * self.slowness * unit_prefill_s(new_tokens, prefix_tokens)

    def tell(self, tokens_per_s: float) -> None:
        """Take the engine's own word, as long as nothing better was seen. Impossible speeds are not believed."""
        if self.prefills == 0 and 0.0 < tokens_per_s < inf:
            self.factor = _bounded(1.0 / tokens_per_s / (PER_TOKEN_S + REFERENCE_TOKENS * PER_PAIR_S), FACTOR_BOUNDS)

    def observe_prefill(self, new_tokens: int, prefix_tokens: int, seconds: float) -> None:
        """A prompt that found the replica idle had its first token after `seconds`."""
        if new_tokens < MIN_TOKENS or not 0.0 < seconds < inf:
            return
        seen = _bounded(seconds / unit_prefill_s(new_tokens, prefix_tokens), FACTOR_BOUNDS)
        self.prefills += 1
        weight = max(LEAST_WEIGHT, 1.0 / self.prefills)
        step = _bounded(weight * (log(seen) - log(self.factor)), (-MOST_STEP, MOST_STEP))
        self.factor *= exp(step)
        self.lag.explained(step)

    def observe_answer(self, seconds: float) -> None:
        """An answer ended, or was given up, so long after its first token."""
        if 0.0 <= seconds < inf:
            self.answers += 1
            self.answer_s += max(LEAST_ANSWER_WEIGHT, 1.0 / self.answers) * (seconds - self.answer_s)

    def observe_decode(self, tokens: int, batch: float, neighbours_s: float, seconds: float) -> None:
        """An answer of `tokens` took `seconds` from its first token, with `batch` requests in flight there on average,
        itself included, and `neighbours_s` prefill seconds of others begun meanwhile."""
        if tokens < MIN_COMPLETION or not 0.0 < seconds < inf:
            return
        # Sums of products of 1, b and s with each other and with y; plain numbers, as most answers only add to them.
        b, s, y = batch, neighbours_s / tokens, seconds / tokens
        n, nb, ns, bb, bs, ss, ny, by, sy = self._sums
        f = FORGETTING
        self._sums = (
            n * f + 1.0,
            nb * f + b,
            ns * f + s,
            bb * f + b * b,
            bs * f + b * s,
            ss * f + s * s,
            ny * f + y,
            by * f + b * y,
            sy * f + s * y,
        )
        self.decodes += 1
        if self.decodes <= SOLVED_EVERY or self.decodes % SOLVED_EVERY == 0:
            self._solve()

    def _solve(self) -> None:
        """Least squares by elimination. No pivot is sought, as the prior's weights make the matrix positive definite.

        It is so small that calling a library would take ten times as long.
        """
        n, nb, ns, bb, bs, ss, ny, by, sy = self._sums
        n, bb, ss = n + _PRIOR_N, bb + _PRIOR_BB, ss + _PRIOR_SS
        ny, by, sy = ny + _PRIOR_N * STEP_S, by + _PRIOR_BB * SLOPE_S, sy + _PRIOR_SS * STALL
        b, s = nb / n, ns / n
        bb, bs, ss, by, sy = bb - b * nb, bs - b * ns, ss - s * ns, by - b * ny, sy - s * ny
        stall = (sy - bs / bb * by) / (ss - bs / bb * bs)
        slope = (by - bs * stall) / bb
        step = (ny - nb * slope - ns * stall) / n
        self.decode = (
            _bounded(step, STEP_BOUNDS),
            _bounded(slope, SLOPE_BOUNDS),
            _bounded(stall, STALL_BOUNDS),
        )


def _bounded(value: float, bounds: tuple[float, float]) -> float:
    return min(max(value, bounds[0]), bounds[1])
