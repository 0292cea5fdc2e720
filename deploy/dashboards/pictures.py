"""Pictures of the dashboards, drawn from a Prometheus: what Grafana would show, as far as matplotlib can."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from io import BytesIO
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, MaxNLocator, PercentFormatter
from PIL import Image

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8a8a00", "#9467bd", "#7f7f7f")
"""Okabe and Ito's, which colour-blind people can tell apart, and three more."""
THRESHOLDS = {"green": "#2e8b57", "orange": "#d98200", "red": "#c62828"}
CELL = (0.78, 0.36)
"""Inches of a cell of Grafana's grid."""
MAX_NAMES = 8
"""In a legend."""
COLOURS_KEPT = 96
"""Of the picture: a third of the bytes."""

Ask = Callable[[str], Sequence[dict[str, Any]]]
"""A range query: Prometheus' series."""


def draw(path: Path, ask: Ask, out: Path) -> None:
    """The dashboard of this JSON file as a picture."""
    board = json.loads(path.read_text())
    panels = board["panels"]
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    with matplotlib.rc_context({"font.size": 7, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(24 * CELL[0], rows * CELL[1] + 0.5), facecolor="white")
        figure.suptitle(board["title"], x=0.01, ha="left", fontsize=12, weight="bold", y=1 - 0.1 / (rows * CELL[1]))
        top = 1 - 0.45 / (rows * CELL[1] + 0.5)
        for panel in panels:
            grid = panel["gridPos"]
            x, width = grid["x"] / 24, grid["w"] / 24
            height = grid["h"] / rows * top
            y = top - grid["y"] / rows * top - height
            if panel["type"] == "row":
                figure.text(
                    0.01, y + height / 2, panel["title"], fontsize=9, weight="bold", va="center", color="#444444"
                )
                continue
            axes = figure.add_axes((x + 0.026, y + 0.3 * height, width - 0.034, 0.54 * height))
            axes.set_title(panel["title"], loc="left", fontsize=8)
            _KINDS[panel["type"]](axes, panel, _series(panel, ask))
        drawn = BytesIO()
        figure.savefig(drawn, dpi=75)
    Image.open(drawn).convert("RGB").quantize(COLOURS_KEPT).save(out, optimize=True)


Series = tuple[str, list[datetime], list[float]]


def _series(panel: dict[str, Any], ask: Ask) -> list[Series]:
    found: list[Series] = []
    for target in panel["targets"]:
        for each in ask(target["expr"]):
            name = target["legendFormat"]
            for label, value in each["metric"].items():
                name = name.replace("{{" + label + "}}", value)
            times = [datetime.fromtimestamp(float(at), UTC) for at, _ in each["values"]]
            found.append((name, times, [float(value) for _, value in each["values"]]))
    return found


def _lines(axes: Axes, panel: dict[str, Any], found: list[Series]) -> None:
    custom = panel["fieldConfig"]["defaults"].get("custom", {})
    named = [(_short(name), times, values) for name, times, values in found]
    handles: list[Any]
    if custom.get("stacking", {}).get("mode") == "normal" and named:
        at = sorted({time for _, times, _ in named for time in times})
        heights = []
        for _, times, values in named:
            known = dict(zip(times, values, strict=True))
            heights.append([_finite(known.get(time, 0.0)) for time in at])
        handles = axes.stackplot(at, heights, colors=COLOURS, alpha=0.75)
    else:
        handles = [
            axes.plot(times, values, color=colour, linewidth=1)[0]
            for (_, times, values), colour in zip(named, cycle(COLOURS), strict=False)
        ]
    axes.set_ylim(bottom=0)
    _thresholds(axes, panel)
    _unit(axes, panel)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: matplotlib.dates.num2date(x).strftime("%H:%M:%S")))
    axes.grid(color="#e4e4e4", linewidth=0.5)
    names = [name for name, _, _ in named]
    if any(names):
        axes.legend(
            handles[:MAX_NAMES],
            names[:MAX_NAMES],
            loc="upper left",
            bbox_to_anchor=(-0.02, -0.12),
            fontsize=6,
            ncols=4 if len(max(names, key=len)) < 20 else 3,
            frameon=False,
        )


def _thresholds(axes: Axes, panel: dict[str, Any]) -> None:
    for step in panel["fieldConfig"]["defaults"]["thresholds"]["steps"]:
        value = step["value"]
        if value is not None and value <= 1.2 * axes.get_ylim()[1]:
            axes.axhline(value, color=THRESHOLDS[step["color"]], linestyle="--", linewidth=0.8)


def _number(axes: Axes, panel: dict[str, Any], found: list[Series]) -> None:
    axes.set_axis_off()
    if panel["options"].get("textMode") == "name":
        axes.text(0.5, 0.5, "\n".join(name for name, _, _ in found), ha="center", va="center", fontsize=10)
        return
    value = next((value for value in reversed(found[0][2]) if math.isfinite(value)), math.nan)
    colour = THRESHOLDS["green"]
    for step in panel["fieldConfig"]["defaults"]["thresholds"]["steps"]:
        if step["value"] is None or value >= step["value"]:
            colour = THRESHOLDS[step["color"]]
    axes.text(0.5, 0.5, _told(panel, value), ha="center", va="center", fontsize=17, color=colour)


def _bars(axes: Axes, panel: dict[str, Any], found: list[Series]) -> None:
    named = sorted(((_short(name), values[-1]) for name, _, values in found), key=lambda each: each[1])[-8:]
    axes.barh([name for name, _ in named], [value for _, value in named], color=COLOURS[5])
    axes.set_xlim(left=0)
    _names_inside(axes)


def _states(axes: Axes, panel: dict[str, Any], found: list[Series]) -> None:
    (mapping,) = panel["fieldConfig"]["defaults"]["mappings"]
    for place, (_, times, values) in enumerate(found):
        for time, following, value in zip(times, times[1:], values, strict=False):
            colour = THRESHOLDS[mapping["options"][str(int(value))]["color"]]
            axes.barh(place, following - time, left=time, color=colour, height=0.7)  # type: ignore[arg-type]
    axes.set_yticks(range(len(found)), [_short(name) for name, _, _ in found])
    _names_inside(axes)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: matplotlib.dates.num2date(x).strftime("%H:%M:%S")))


def _names_inside(axes: Axes) -> None:
    axes.tick_params(axis="y", labelsize=6, pad=-4)
    for label in axes.get_yticklabels():
        label.set_horizontalalignment("left")


def _heat(axes: Axes, panel: dict[str, Any], found: list[Series]) -> None:
    bounds = sorted(found, key=lambda each: float(each[0]))
    at = sorted({time for _, times, _ in bounds for time in times})
    below = [0.0] * len(at)
    grid = []
    for _, times, values in bounds:
        known = dict(zip(times, values, strict=True))
        now = [_finite(known.get(time, 0.0)) for time in at]
        grid.append([max(0.0, upper - lower) for upper, lower in zip(now, below, strict=True)])
        below = now
    axes.pcolormesh(at, range(len(bounds)), grid, cmap="Oranges")  # type: ignore[arg-type]
    axes.set_yticks(range(len(bounds)), [f"{name} s" for name, _, _ in bounds], fontsize=5)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: matplotlib.dates.num2date(x).strftime("%H:%M:%S")))


_KINDS: dict[str, Callable[[Axes, dict[str, Any], list[Series]], None]] = {
    "timeseries": _lines,
    "stat": _number,
    "bargauge": _bars,
    "state-timeline": _states,
    "heatmap": _heat,
}


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0


def _short(name: str) -> str:
    return name.removeprefix("http://")


def _told(panel: dict[str, Any], value: float) -> str:
    defaults = panel["fieldConfig"]["defaults"]
    decimals = defaults.get("decimals", 1)
    if defaults["unit"] == "percentunit":
        return f"{value:.{decimals}%}"
    if defaults["unit"] == "s":
        return f"{value:.3g} s"
    return f"{value:.{decimals}f}/s" if defaults["unit"] == "reqps" else f"{value:.3g}"


def _unit(axes: Axes, panel: dict[str, Any]) -> None:
    unit = panel["fieldConfig"]["defaults"]["unit"]
    formatters = {
        "percentunit": PercentFormatter(1.0),
        "s": EngFormatter("s"),
        "bytes": EngFormatter("B"),
        "reqps": FuncFormatter(lambda y, _: f"{y:g}/s"),
    }
    axes.yaxis.set_major_formatter(formatters.get(unit, EngFormatter()))
    axes.yaxis.set_major_locator(MaxNLocator(5))
