"""The kinds of panels there are. Each has a title, a description for who is on call, a unit and its queries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from string import ascii_uppercase
from typing import Any

from grafana_foundation_sdk.builders import (
    bargauge,
    common,
    dashboard,
    heatmap,
    prometheus,
    stat,
    statetimeline,
    timeseries,
)
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import heatmap as heatmap_models
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from deploy.dashboards.queries import Query

WIDTH = 24
"""Columns of Grafana's grid."""
SOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
GREEN, AMBER, RED = "green", "orange", "red"

Steps = Sequence[tuple[float, str]]
"""From these values on, these colours; green before."""


def lines(
    title: str,
    description: str,
    unit: str,
    *queries: Query,
    width: int = 8,
    steps: Steps = (),
    stacked: bool = False,
    top: float | None = None,
) -> timeseries.Panel:
    """Values over time. `top` fixes the upper end, as of a share."""
    panel = timeseries.Panel().fill_opacity(40 if stacked else 8).line_width(1).span_nulls(False)
    panel = panel.legend(
        common.VizLegendOptions()
        .display_mode(common_models.LegendDisplayMode.TABLE)
        .placement(common_models.LegendPlacement.BOTTOM)
        .show_legend(True)
        .calcs(["lastNotNull", "max"])
    )
    panel = panel.tooltip(
        common.VizTooltipOptions().mode(common_models.TooltipDisplayMode.MULTI).sort(common_models.SortOrder.DESCENDING)
    )
    if stacked:
        panel = panel.stacking(common.StackingConfig().mode(common_models.StackingMode.NORMAL))
    if steps:
        line = common.GraphThresholdsStyleConfig().mode(common_models.GraphThresholdsStyleMode.DASHED)
        panel = panel.thresholds_style(line)
    panel = panel.min(0).no_value("none")
    if top is not None:
        panel = panel.max(top)
    return _finished(panel, title, description, unit, queries, steps, width, 8)


def number(
    title: str,
    description: str,
    unit: str,
    query: Query,
    *,
    steps: Steps = (),
    base: str = GREEN,
    text: bool = False,
    decimals: int | None = None,
    width: int = 4,
) -> stat.Panel:
    """One figure of now. `base` is its colour below all steps; `text` shows the series' name instead of its value."""
    panel = stat.Panel().reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    panel = panel.graph_mode(
        common_models.BigValueGraphMode.NONE if text else common_models.BigValueGraphMode.AREA
    ).color_mode(common_models.BigValueColorMode.VALUE)
    if text:
        panel = panel.text_mode(common_models.BigValueTextMode.NAME)
    if decimals is not None:
        panel = panel.decimals(decimals)
    return _finished(panel, title, description, unit, (query,), steps, width, 4, base)


def bars(title: str, description: str, unit: str, query: Query, *, steps: Steps = (), width: int = 8) -> bargauge.Panel:
    """One bar for each series, of now."""
    panel = (
        bargauge.Panel()
        .orientation(common_models.VizOrientation.HORIZONTAL)
        .display_mode(common_models.BarGaugeDisplayMode.BASIC)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .min(0)
    )
    return _finished(panel, title, description, unit, (query,), steps, width, 8)


def states(
    title: str, description: str, query: Query, names: Mapping[int, tuple[str, str]], *, width: int = 8
) -> statetimeline.Panel:
    """A band for each series, coloured by what its value stands for: text and colour."""
    options = {
        str(value): models.ValueMappingResult(text=text, color=colour) for value, (text, colour) in names.items()
    }
    panel = (
        statetimeline.Panel()
        .mappings([models.ValueMap(options)])
        .show_value(common_models.VisibilityMode.NEVER)
        .row_height(0.8)
    )
    return _finished(panel, title, description, "short", (query,), (), width, 8)


def heat(title: str, description: str, unit: str, query: Query, *, width: int = 12) -> heatmap.Panel:
    """A histogram over time."""
    panel = (
        heatmap.Panel()
        .calculate(False)
        .color(heatmap.HeatmapColorOptions().mode(heatmap_models.HeatmapColorMode.SCHEME).scheme("Oranges").steps(64))
        .y_axis(heatmap.YAxisConfig().unit(unit))
        .cell_gap(1)
    )
    return _finished(panel, title, description, unit, (query,), (), width, 8)


def _finished(
    panel: Any,
    title: str,
    description: str,
    unit: str,
    queries: Sequence[Query],
    steps: Steps,
    width: int,
    height: int,
    base: str = GREEN,
) -> Any:
    thresholds = [models.Threshold(value=None, color=base)]
    thresholds += [models.Threshold(value=value, color=colour) for value, colour in steps]
    panel = (
        panel.title(title)
        .description(description)
        .datasource(SOURCE)
        .unit(unit)
        .span(width)
        .height(height)
        .thresholds(dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(thresholds))
    )
    for letter, query in zip(ascii_uppercase, queries, strict=False):
        target = prometheus.Dataquery().expr(query.expr).legend_format(query.legend or "__auto").ref_id(letter)
        target = target.datasource(SOURCE)
        if isinstance(panel, stat.Panel | bargauge.Panel):
            target = target.instant() if isinstance(panel, bargauge.Panel) else target.range()
        if isinstance(panel, heatmap.Panel):
            target = target.format(PromQueryFormat.HEATMAP)
        panel = panel.with_target(target)
    return panel
