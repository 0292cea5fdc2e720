"""A picture of one replica with more and more users, for docs/claims.md.

python -m benchmarks.claims.picture docs/images/claims-replica.svg
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib

from benchmarks.claims.play import Figures, Setting, measure, values
from benchmarks.claims.replica import users_and_steps
from sim.results import estimate

STEPS = ("untuned", "+ FP8 KV", "+ host tier", "+ DFlash tuned, 5.84")
USERS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16)
PANELS = {"output_per_s": "output tokens/s, all users", "user_tokens_per_s": "tokens/s of a user"}


def draw(found: dict[str, list[Figures]], file: Path) -> None:
    """Throughput and a user's speed over users, a line for each step."""
    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "claims", "svg.fonttype": "none"})  # the same file each time
    from matplotlib import pyplot, ticker

    figure, axes = pyplot.subplots(1, len(PANELS), figsize=(9.0, 3.4), layout="constrained")
    for axis, (key, title) in zip(axes, PANELS.items(), strict=True):
        for step in STEPS:
            means = [estimate(values(found[f"{step}/{n}"], key)).mean for n in USERS]
            axis.plot(USERS, means, marker="o", markersize=3, label=step)
        axis.set(xlabel="users of 100k tokens on one replica", title=title, yscale="log")
        axis.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
        axis.yaxis.set_minor_formatter(ticker.NullFormatter())
        axis.grid(alpha=0.3)
    axes[1].legend(fontsize=8)
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)


def main() -> None:
    cli = argparse.ArgumentParser(description="One replica with more and more users, as SVG.")
    cli.add_argument("file", type=Path)
    cli.add_argument("--jobs", type=int, default=1, help="processes (default: %(default)s)")
    args = cli.parse_args()
    draw(measure(Setting((71, 72), args.jobs), users_and_steps(STEPS, USERS)), args.file)


if __name__ == "__main__":
    main()
