"""Claims about one replica: where it collapses, and what FP8 KV, a host tier and speculation add."""

from __future__ import annotations

from math import inf

from benchmarks.claims.claim import Claim, Line, about, times
from benchmarks.claims.play import Figures, Run, Setting, find, measure, values
from sim.machine import DFLASH, DFLASH_TUNED, EAGLE3_MIXED
from sim.results import estimate

USERS = (2, 4, 6, 8, 12)
FP8 = {"fleet__machine": "kimi-int4-tp4-fp8", "fleet__kv_tokens": 900_000}
HOST = {**FP8, "fleet__host_tier": True}
STEPS: dict[str, dict[str, object]] = {
    "untuned": {},
    "+ FP8 KV": {**FP8},
    "+ host tier": {**HOST},
    "+ EAGLE3, 2.5 tokens a step": {**HOST, "fleet__accept_length": EAGLE3_MIXED},
    "+ DFlash, 5.0": {**HOST, "fleet__accept_length": DFLASH},
    "+ DFlash tuned, 5.84": {**HOST, "fleet__accept_length": DFLASH_TUNED},
    "untuned with EAGLE3, 2.5": {"fleet__accept_length": EAGLE3_MIXED},
}
"""What is added to the replica, one after the other; the last is another beginning."""


def users_and_steps(steps: tuple[str, ...], users: tuple[int, ...]) -> dict[str, Run]:
    """A run of each step with each number of users, named `step/users`."""
    return {f"{step}/{n}": Run(find("claim-replica", full=n, **STEPS[step])) for step in steps for n in users}


def _cells(rows: list[Figures]) -> list[str]:
    keys = ("output_per_s", "user_tokens_per_s", "ttft_p50_s", "hit_total")
    return [str(estimate(values(rows, key))) for key in keys]


HEAD = ["output tokens/s", "tokens/s of a user", "TTFT p50, s", "hit rate"]


def collapse(setting: Setting) -> Claim:
    """Row 2."""
    users = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12)
    found = measure(setting, users_and_steps(("untuned",), users))
    by = {n: found[f"untuned/{n}"] for n in users}
    best = max(users, key=lambda n: estimate(values(by[n], "output_per_s")).mean)
    lines = [
        Line("users at the greatest throughput", "6", estimate([float(best)]), 5, 7),
        Line(
            "output tokens/s with 8 users, over the greatest",
            "collapses",
            times(values(by[8], "output_per_s"), values(by[best], "output_per_s")),
            0.0,
            0.5,
            1.0,
        ),
        Line(
            "tokens/s of a user with 8 users, over that with 4",
            "collapses",
            times(values(by[8], "user_tokens_per_s"), values(by[4], "user_tokens_per_s")),
            0.0,
            0.5,
            1.0,
        ),
    ]
    return Claim(
        "collapse: an untuned replica beyond six users (row 2)",
        lines,
        [["users", *HEAD], *([str(n), *_cells(rows)] for n, rows in by.items())],
    )


def tuned(setting: Setting) -> Claim:
    """Rows 3 and 5."""
    found = measure(setting, users_and_steps(tuple(STEPS), USERS))

    def at(step: str, users: int, key: str) -> list[float]:
        return values(found[f"{step}/{users}"], key)

    def best(step: str) -> list[float]:
        """The greatest throughput of each seed."""
        return [max(all_) for all_ in zip(*(at(step, n, "output_per_s") for n in USERS), strict=True)]

    last = "+ DFlash tuned, 5.84"
    lines = []
    for base in ("untuned", "untuned with EAGLE3, 2.5"):
        speed = times(at(last, 4, "user_tokens_per_s"), at(base, 4, "user_tokens_per_s"))
        lines += [
            Line(f"tokens/s of a user over {base}, 4 users", "2.8", speed, *about(2.8), 1.0),
            Line(f"greatest throughput over {base}", "5.6", times(best(last), best(base)), *about(5.6), 1.0),
        ]
    for users in (4, 8):
        faster = times(at(last, users, "user_tokens_per_s"), at("+ DFlash, 5.0", users, "user_tokens_per_s"))
        lines.append(Line(f"5.84 over 5.0 tokens a step: a user's speed, {users} users", "1.2", faster, 1.1, 1.3, 1.0))
    details = [["", "greatest output tokens/s", *(f"a user's tokens/s, {n}" for n in USERS)]]
    for step in STEPS:
        speeds = [str(estimate(at(step, n, "user_tokens_per_s"))) for n in USERS]
        details.append([step, str(estimate(best(step))), *speeds])
    return Claim("tuned: what FP8 KV, host tier and speculation add (rows 3 and 5)", lines, details)


def fp8(setting: Setting) -> Claim:
    """Row 6."""
    users = (4, 6, 8, 10)
    found = measure(setting, users_and_steps(("untuned", "+ FP8 KV"), users))
    by = {name: {n: found[f"{name}/{n}"] for n in users} for name in ("untuned", "+ FP8 KV")}
    tokens = [find("claim-replica", **change).equipment().groups[0].limits.kv_tokens for change in ({}, FP8)]
    rate = times(values(by["+ FP8 KV"][8], "output_per_s"), values(by["untuned"][8], "output_per_s"))
    lines = [
        Line("tokens of KV over BF16", "2", estimate([tokens[1] / tokens[0]]), 1.9, 2.1, 1.0),
        Line("output tokens/s of 8 users over BF16", "twice the users", rate, 2.0, inf, 1.0),
    ]
    rows = [[name, str(n), *_cells(rows)] for name, runs in by.items() for n, rows in runs.items()]
    return Claim("fp8: FP8 KV holds twice the tokens (row 6)", lines, [["", "users", *HEAD], *rows])
