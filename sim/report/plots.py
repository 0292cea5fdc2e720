"""The pictures of a report, by matplotlib. Okabe and Ito's colours, which colour-blind people can tell apart."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from sim import results
from sim.events import ScaleOut
from sim.jobs import Result
from sim.machine import find_machine
from sim.measure import percentile

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "svg.hashsalt": "warmroute",  # equal runs, equal files
}
_CONCURRENCY = ("load", "full")
"""Keys of a scenario that change how many sessions are live, and nothing else."""
_QUANTILES = 400
"""Points of a distribution's line."""


@dataclass(frozen=True, slots=True)
class Picture:
    """A figure under a file's name, with what is to be said of it."""

    name: str
    figure: Figure
    caption: str


def as_svg(picture: Picture) -> str:
    """To stand inside HTML: text is drawn, so no font is needed."""
    out = io.StringIO()
    with matplotlib.rc_context(_STYLE):
        picture.figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    # Several in one page: what they refer to inside must not be met in another.
    text = re.sub(r'((?:id="|href="#|url\(#))', rf"\1{picture.name}-", text)
    return text[text.index("<svg") :]


def as_png(picture: Picture) -> bytes:
    """At a size for slides and tickets."""
    out = io.BytesIO()
    with matplotlib.rc_context(_STYLE):
        picture.figure.savefig(out, format="png", dpi=150)
    return out.getvalue()


def pictures(found: Sequence[Result]) -> Iterator[Picture]:
    """Those that these results have data for."""
    with matplotlib.rc_context(_STYLE):
        if _swept(found):
            yield _hits(found)
            yield _waits_by_concurrency(found)
            yield _throughput(found)
            return
        for group in results.by_scenario(found).values():
            yield _distribution(group)
            if any(counts for run in group for _, counts in run.history):
                yield _history(group)
            if any(isinstance(event, ScaleOut) for event in group[0].job.scenario.events):
                yield _scale_out(group)


def _name(what: str, result: Result) -> str:
    scenario = result.job.scenario
    varied = [f"{key}={value}" for key, value in scenario.varied]
    return re.sub(r"[^\w-]+", "-", "-".join([what, scenario.name, *varied]))


def _swept(found: Sequence[Result]) -> bool:
    """Whether concurrency takes several values in one scenario."""
    return any(len({result.job.scenario.live for result in group}) > 1 for group in _by_name(found).values())


def _by_name(found: Sequence[Result]) -> dict[str, list[Result]]:
    """By scenario and what was varied in it besides concurrency: a line of a picture."""
    named: dict[str, list[Result]] = {}
    for result in found:
        scenario = result.job.scenario
        others = [f"{key}={value}" for key, value in scenario.varied if key not in _CONCURRENCY]
        named.setdefault(" ".join([scenario.name, *others]), []).append(result)
    return named


def _figure(width: float, height: float, rows: int = 1) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(width, height), layout="constrained")
    made = figure.subplots(rows, 1, squeeze=False, sharex=True)
    return figure, [row[0] for row in made]


def _distribution(group: Sequence[Result]) -> Picture:
    figure, (axes,) = _figure(7.5, 4.2)
    for (label, runs), colour, marker in zip(
        results.by_candidate(group).items(), cycle(COLOURS), cycle(MARKERS), strict=False
    ):
        waits = sorted(wait for run in runs for wait in run.waits)
        shares = [i / _QUANTILES for i in range(_QUANTILES + 1)]
        axes.plot([max(percentile(waits, share), 1e-3) for share in shares], shares, color=colour)
        p50, p99 = percentile(waits, 0.5), percentile(waits, 0.99)
        axes.plot([p50, p99], [0.5, 0.99], marker, color=colour)
        axes.plot([], [], marker + "-", color=colour, label=f"{label}: p50 {p50:.2g} s, p99 {p99:.3g} s")
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlim(left=0.02)
    axes.set_xlabel("time to first token, s (logarithmic)")
    axes.set_ylabel("requests answered by then")
    axes.set_title(results.heading(group[0]), loc="left")
    axes.legend(loc="upper left")
    seeds = sorted({result.job.seed for result in group})
    caption = (
        f"Time to first token, all requests of {len(seeds)} seeds. The marks are the median and the 99th percentile."
    )
    return Picture(_name("ttft", group[0]), figure, caption)


def _history(group: Sequence[Result]) -> Picture:
    """Requests in flight by replica and time, a panel for each policy."""
    runs = [runs[0] for runs in results.by_candidate(group).values()]
    scenario = group[0].job.scenario
    most = max((max(counts.values(), default=0) for run in runs for _, counts in run.history), default=1)
    figure, panels = _figure(9.0, 0.9 + 2.1 * len(runs), len(runs))
    for axes, run in zip(panels, runs, strict=True):
        names = sorted({name for _, counts in run.history for name in counts})
        grid = [[float(counts.get(name, "nan")) for _, counts in run.history] for name in names]
        times = [time / 60 for time, _ in run.history]
        mesh = axes.pcolormesh(times, range(len(names)), grid, cmap="cividis", vmin=0, vmax=most, rasterized=True)
        axes.set_facecolor("#bbbbbb")
        axes.grid(visible=False)
        axes.set_ylabel("replica")
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.set_title(run.job.candidate.label, loc="left", fontsize=10)
        axes.axvline(scenario.warm_up_s / 60, color="white", linestyle=":", linewidth=1.2)
        for event in scenario.events:
            axes.axvline(event.at_s / 60, color="white", linestyle="--", linewidth=1.2)
    for event in scenario.events:
        panels[0].annotate(
            event.kind.replace("_", " "), (event.at_s / 60, 1), xycoords=("data", "axes fraction"),
            xytext=(0, 2), textcoords="offset points", ha="center", fontsize=9,
        )  # fmt: skip
    panels[-1].set_xlabel("time, min")
    figure.suptitle(results.heading(group[0]), x=0.01, ha="left", fontsize=11)
    bar = figure.colorbar(mesh, ax=panels, label="requests in flight", aspect=30)
    bar.locator = MaxNLocator(integer=True)
    bar.update_ticks()
    caption = (
        f"Requests in flight on each replica every ten seconds, seed {runs[0].job.seed}. Counting begins at the dotted "
        "line; events are dashed; a replica that is not there is grey."
    )
    return Picture(_name("load", group[0]), figure, caption)


def _scale_out(group: Sequence[Result]) -> Picture:
    named = results.by_candidate(group)
    figure, (axes,) = _figure(7.5, 1.4 + 0.45 * len(named))
    for place, runs in enumerate(named.values()):
        resident = sum(run.value("resident_sessions") for run in runs) or 1
        new = sum(run.value("kv_lost_moves_to_new") for run in runs) / resident
        lost = sum(run.value("kv_lost_moves") for run in runs) / resident
        axes.barh(place, new, color=COLOURS[1], label="to a new replica" if not place else None)
        axes.barh(place, lost - new, left=new, color=COLOURS[4], label="to another" if not place else None)
        axes.annotate(f" {lost:.1%} of {resident:.0f}", (lost, place), va="center")
    axes.set_yticks(range(len(named)), list(named))
    axes.invert_yaxis()
    axes.margins(x=0.25)
    axes.grid(visible=False, axis="y")
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_xlabel("sessions that moved and lost their KV, of those resident when the fleet grew")
    axes.set_title(results.heading(group[0]), loc="left")
    figure.legend(loc="outside lower right", ncols=2)
    caption = "What a scale-out cost: first turns after it that went where less than half of their KV was resident."
    return Picture(_name("scale-out", group[0]), figure, caption)


def _lines(found: Sequence[Result]) -> Iterator[tuple[str, str, str, list[list[Result]]]]:
    """Label, colour, marker and points (the runs of all seeds) of every scenario and policy, by rising concurrency."""
    styles = zip(cycle(COLOURS), cycle(MARKERS), strict=False)
    several = len(_by_name(found)) > 1
    for name, group in _by_name(found).items():
        for label, runs in results.by_candidate(group).items():
            points: dict[int, list[Result]] = {}
            for run in runs:
                points.setdefault(run.job.scenario.live, []).append(run)
            colour, marker = next(styles)
            yield f"{name}, {label}" if several else label, colour, marker, [points[live] for live in sorted(points)]


def _mean(runs: Sequence[Result], key: str) -> float:
    return results.estimate([run.value(key) for run in runs]).mean


def _concurrency(runs: Sequence[Result]) -> float:
    scenario = runs[0].job.scenario
    return scenario.live / scenario.replicas


def _hits(found: Sequence[Result]) -> Picture:
    figure, axes = _by_concurrency(found, "hit_total", "hit_gpu")
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_ylabel("prompt tokens that were cached")
    caption = "Hit rate against concurrency. Whole lines: both tiers; dotted: GPU memory alone."
    return Picture("hit-rate", figure, caption)


def _waits_by_concurrency(found: Sequence[Result]) -> Picture:
    figure, axes = _by_concurrency(found, "ttft_p99_s", "ttft_p50_s")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.set_ylabel("time to first token, s (logarithmic)")
    caption = "Time to first token against concurrency. Whole lines: 99th percentile; dotted: median."
    return Picture("ttft-by-concurrency", figure, caption)


def _by_concurrency(found: Sequence[Result], whole: str, dotted: str) -> tuple[Figure, Axes]:
    """Two figures of each policy against live sessions per replica."""
    figure, (axes,) = _figure(7.5, 4.2)
    for label, colour, marker, points in _lines(found):
        concurrency = [_concurrency(runs) for runs in points]
        axes.plot(concurrency, [_mean(runs, whole) for runs in points], marker + "-", color=colour, label=label)
        axes.plot(concurrency, [_mean(runs, dotted) for runs in points], marker + ":", color=colour, mfc="white")
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("live sessions per replica")
    figure.legend(loc="outside upper left", ncols=2)
    return figure, axes


def _throughput(found: Sequence[Result]) -> Picture:
    figure, (axes,) = _figure(7.5, 4.2)
    for label, colour, marker, points in _lines(found):
        x = [1 / (_mean(runs, "tpot_p50_s") or 1.0) for runs in points]
        y = [60 * _mean(runs, "tokens_per_s") / _gpus(runs[0]) for runs in points]
        axes.plot(x, y, marker + "-", color=colour, label=label)
        for runs, right, up in zip(points, x, y, strict=True):
            axes.annotate(
                f"{_concurrency(runs):.3g}",
                (right, up),
                xytext=(5, 4),
                textcoords="offset points",
                fontsize=8,
                color=colour,
            )
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.0f}"))
    axes.set_xlabel("interactivity: output tokens per second and user (median)")
    axes.set_ylabel("tokens per minute and GPU, in and out")
    figure.legend(loc="outside upper left", ncols=2)
    caption = "Throughput against interactivity. The numbers are live sessions per replica."
    return Picture("throughput", figure, caption)


def _gpus(result: Result) -> int:
    return sum(find_machine(group.machine).gpus * group.count for group in result.job.scenario.fleet)
