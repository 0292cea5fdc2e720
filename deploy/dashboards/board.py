"""What all dashboards share: variables, links between them, times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.models import dashboard as models

from deploy.dashboards.panels import SOURCE

TAG = "warmroute"

Row = tuple[str, Sequence[Any]]
"""A heading and its panels."""


def board(name: str, title: str, description: str, rows: Sequence[Row], *more: Any) -> dashboard.Dashboard:
    """A dashboard. `more` are variables of its own."""
    made = (
        dashboard.Dashboard(f"warmroute: {title}")
        .uid(f"warmroute-{name}")
        .description(description)
        .tags([TAG])
        .time("now-1h", "now")
        .refresh("30s")
        .timezone("browser")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .link(dashboard.DashboardLink("warmroute").tags([TAG]).as_dropdown(True).keep_time(True).include_vars(True))
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
    )
    for variable in (*_variables(), *more):
        made = made.with_variable(variable)
    for heading, panels in rows:
        made = made.with_row(dashboard.Row(heading))
        for panel in panels:
            made = made.with_panel(panel)
    return made


def _variables() -> Sequence[dashboard.QueryVariable]:
    return (
        _query("job", "Router job", "label_values(warmroute_build_info, job)"),
        _query("instance", "Router", 'label_values(warmroute_build_info{job=~"$job"}, instance)'),
        _query(
            "replica",
            "Replica",
            'label_values(warmroute_replica_state{job=~"$job", instance=~"$instance"}, replica)',
        ),
        _query("engine", "Engine job", "label_values(sglang:num_running_reqs, job)"),
    )


def _query(name: str, label: str, query: str) -> dashboard.QueryVariable:
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(SOURCE)
        .query(query)
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.NATURAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(models.VariableOption(selected=True, text="All", value="$__all"))
    )


def choice(name: str, label: str, description: str, values: Sequence[str], default: str) -> dashboard.CustomVariable:
    """A variable whose values are given."""
    return (
        dashboard.CustomVariable(name)
        .label(label)
        .description(description)
        .values(", ".join(values))
        .current(models.VariableOption(selected=True, text=default, value=default))
    )
