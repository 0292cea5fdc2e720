"""The command line: `python -m benchmarks.claims`."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from benchmarks.claims.affinity import affinity
from benchmarks.claims.claim import Claim
from benchmarks.claims.cpd import cpd
from benchmarks.claims.fleet import even, growth, hashing, scaleout
from benchmarks.claims.memory import nvfp4, overshoot
from benchmarks.claims.play import Setting
from benchmarks.claims.replica import collapse, fp8, tuned
from benchmarks.claims.width import width

CLAIMS: dict[str, Callable[[Setting], Claim]] = {
    each.__name__: each
    for each in (collapse, tuned, width, fp8, nvfp4, overshoot, hashing, even, scaleout, growth, affinity, cpd)
}


def main() -> None:
    cli = argparse.ArgumentParser(prog="benchmarks.claims", description="Published claims beside the simulator.")
    cli.add_argument("names", nargs="*", help=f"of {', '.join(CLAIMS)}; all unless given")
    cli.add_argument("--seeds", default="71..74", help="first..last (default: %(default)s)")
    cli.add_argument("--jobs", type=int, default=1, help="processes (default: %(default)s)")
    args = cli.parse_args()
    unknown = [name for name in args.names if name not in CLAIMS]
    if unknown:
        cli.error(f"no claim {', '.join(unknown)}; there are {', '.join(CLAIMS)}")
    first, _, last = args.seeds.partition("..")
    setting = Setting(tuple(range(int(first), int(last or first) + 1)), args.jobs)
    for name in args.names or CLAIMS:
        print("\n".join(CLAIMS[name](setting).markdown()), flush=True)


if __name__ == "__main__":
    main()
