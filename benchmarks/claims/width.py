"""The claim that TP4 is the unit of scaling: what TP8 holds more, and what it computes more."""

from __future__ import annotations

from benchmarks.claims.claim import Claim, Line, about, times
from benchmarks.claims.play import Figures, Run, Setting, find, measure, values
from sim.machine import B200_NOMINAL, DFLASH_TUNED, KIMI, Memory
from sim.results import estimate

USERS = (8, 16, 24)
COLD = {"synthetic__compact_tokens": 1, "synthetic__compacted_tokens": 100_000, "synthetic__system_tokens": 0}
"""Every prompt is of 100k tokens, none of which was seen before."""
KINDS: dict[str, dict[str, object]] = {
    "cold prompts": {**COLD},
    "sessions": {},
    "sessions, DFlash": {"fleet__accept_length": DFLASH_TUNED},
}
PREFILL_GPUS, TP4_GPUS = 8, 4


def _runs() -> dict[str, Run]:
    runs = {}
    for kind, change in KINDS.items():
        for users in USERS:
            # `full` is for each replica, and four more decode.
            runs[f"{kind}/8/{users}"] = Run(find("claim-tp8-prefill", full=users / 5, **change))
            runs[f"{kind}/4/{users}"] = Run(find("claim-replica", full=users, fleet__host_tier=True, **change))
    return runs


def width(setting: Setting) -> Claim:
    """Row 4."""
    found = measure(setting, _runs())

    def best(kind: str, tp: int) -> list[float]:
        """Tokens/s of a GPU, the greatest over users, for each seed."""
        gpus = PREFILL_GPUS if tp == PREFILL_GPUS else TP4_GPUS
        each: list[list[Figures]] = [found[f"{kind}/{tp}/{users}"] for users in USERS]
        return [max(all_) / gpus for all_ in zip(*(values(rows, "tokens_per_s") for rows in each), strict=True)]

    def tokens(tp: int, kv_dtype: str) -> float:
        return float(Memory(KIMI, "int4", B200_NOMINAL, tp, kv_dtype, fraction=1.0).kv_tokens)

    lines = [
        Line("KV tokens of TP4, BF16", "450k", estimate([tokens(4, "bfloat16")]), 427_500, 472_500),
        Line("KV tokens of TP8, BF16", "3M", estimate([tokens(8, "bfloat16")]), 2.85e6, 3.15e6),
        Line("KV tokens of TP8, FP8", "3M", estimate([tokens(8, "fp8")]), 2.85e6, 3.15e6),
        *(
            Line(
                f"tokens/s of a GPU, TP8 for prefill alone over TP4 for both: {kind}",
                "about 1",
                times(best(kind, 8), best(kind, 4)),
                *about(1.0),
            )
            for kind in KINDS
        ),
    ]
    details = [["", "TP4, both: tokens/s of a GPU", "TP8, prefill alone"]]
    details += [[kind, *(str(estimate(best(kind, tp))) for tp in (4, 8))] for kind in KINDS]
    return Claim("width: TP4 against TP8 (row 4)", lines, details)
