"""The static fill: 250 equal sessions on 50 idle replicas, none of which ends. How evenly does a policy place them?

Each session has one request, begins one second after the last, had its first token before the next one comes, and stays
in flight. Sessions are alike but for their names; as hashes depend on those, each policy places several sets of names,
policies that draw lots with another seed for each.

Prints a JSON line for each policy: `max_over_mean`, sessions on the fullest replica over the mean, is the mean over
all sets; `worst` the largest of any; `most` and `least` are sessions on the fullest and the emptiest replica of any.

    python -m benchmarks.fill
    python -m benchmarks.fill --svg docs/images/fill.svg
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from xxhash import xxh3_64_intdigest, xxh3_128_digest

from policies.balancer import Balancer
from policies.registry import POLICIES, make, parameters
from policies.types import Replica, Request

REPLICAS, SESSIONS, SETS = 50, 250, 12
PROMPT_TOKENS = 60_000
BLOCKS = 60
"""Of a body of 240 KiB."""


@dataclass(frozen=True, slots=True)
class Fill:
    """How a policy placed the sessions; see the module."""

    policy: str
    replicas: int
    sessions: int
    sets: int
    max_over_mean: float
    worst: float
    most: int
    least: int


def request(number: int, session: int) -> Request:
    """The only request of a session of the set of this number; it shares nothing with any other."""
    name = b"set %d session %d" % (number, session)
    return Request(
        key=xxh3_128_digest(name),
        fingerprint=xxh3_64_intdigest(name),
        prompt_tokens=PROMPT_TOKENS,
        blocks=tuple(xxh3_64_intdigest(name, seed) for seed in range(1, BLOCKS + 1)),
    )


def place(policy: str, number: int) -> list[int]:
    """Sessions on each replica when the policy has placed one set."""
    balancer = Balancer(make(policy, {"seed": number} if "seed" in parameters(policy) else {}))
    for replica in range(REPLICAS):
        balancer.join(Replica(f"http://10.0.0.{replica}:30000"), 0.0)
    for session in range(SESSIONS):
        balancer.acquire(request(number, session), 1.0 + session).first_token(1.9 + session)
    return [replica.in_flight for replica in balancer.ready]


def fill(policy: str) -> Fill:
    """Place all sets, each on a fleet of its own."""
    placed = [place(policy, number) for number in range(SETS)]
    mean = SESSIONS / REPLICAS
    fullest = [max(counts) for counts in placed]
    return Fill(
        policy,
        REPLICAS,
        SESSIONS,
        SETS,
        max_over_mean=round(sum(fullest) / SETS / mean, 3),
        worst=max(fullest) / mean,
        most=max(fullest),
        least=min(min(counts) for counts in placed),
    )


def svg(fills: list[Fill]) -> str:
    """A bar for each policy, most even first."""
    row, left, scale, width = 24, 130, 130, 620
    top = 72
    height = top + row * len(fills) + 8
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="13">',
        "<title>Sessions on the fullest replica over the mean</title>",
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text x="8" y="18" font-weight="bold">{SESSIONS} equal sessions on {REPLICAS} replicas</text>',
        f'<g font-size="12" fill="#555"><text x="8" y="38">Bar: sessions on the fullest replica over the mean, on '
        f"average of {SETS} fills; line: in the worst.</text>",
        '<text x="8" y="56">Right: sessions on the emptiest and on the fullest replica of all fills.</text></g>',
    ]
    for n, fill in enumerate(sorted(fills, key=lambda fill: (fill.max_over_mean, fill.worst, fill.policy))):
        y = top + n * row
        bar, worst = fill.max_over_mean * scale, fill.worst * scale
        colour = "#2a7" if fill.policy == "session_affinity" else "#579"
        lines += [
            f'<text x="{left - 6}" y="{y + 12}" text-anchor="end">{fill.policy}</text>',
            f'<rect x="{left}" y="{y}" width="{bar:.1f}" height="16" fill="{colour}"/>',
            f'<line x1="{left + bar:.1f}" y1="{y + 8}" x2="{left + worst:.1f}" y2="{y + 8}" stroke="{colour}"/>',
            f'<text x="{left + 4}" y="{y + 12}" fill="#fff">{fill.max_over_mean:.2f}</text>',
            f'<text x="{width - 8}" y="{y + 12}" text-anchor="end" fill="#555">{fill.least} to {fill.most}</text>',
        ]
    return "\n".join([*lines, "</svg>", ""])


def main() -> None:
    cli = argparse.ArgumentParser(description="How evenly policies place equal sessions.")
    cli.add_argument("policies", nargs="*", help="all unless given")
    cli.add_argument("--svg", type=Path, help="file that gets a plot of the same")
    args = cli.parse_args()
    unknown = [name for name in args.policies if name not in POLICIES]
    if unknown:
        cli.error(f"unknown policy {', '.join(unknown)}; known: {', '.join(POLICIES)}")
    fills = []
    for policy in args.policies or POLICIES:
        fills.append(fill(policy))
        print(json.dumps(asdict(fills[-1])), flush=True)
    if args.svg:
        args.svg.write_text(svg(fills))


if __name__ == "__main__":
    main()
