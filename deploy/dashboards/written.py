"""The dashboards as Grafana imports them."""

from __future__ import annotations

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from deploy.dashboards.decisions import decisions
from deploy.dashboards.fleet import fleet
from deploy.dashboards.sessions import sessions
from deploy.dashboards.slo import slo

BOARDS = {"fleet": fleet, "sessions": sessions, "decisions": decisions, "slo": slo}


def written() -> dict[str, str]:
    """JSON by name."""
    return {name: JSONEncoder(sort_keys=True, indent=2).encode(make().build()) + "\n" for name, make in BOARDS.items()}
