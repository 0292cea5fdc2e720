"""`python -m tests.deploy.pictures [SECONDS] [FOLDER]`: each dashboard, drawn from a run that is watched as in tests.

Writes dashboard-NAME.png, into docs/images when no folder is given. Needs Prometheus; see scripts/test-dashboards.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from deploy.dashboards.pictures import draw
from tests.deploy.queries import DASHBOARDS, filled
from tests.deploy.watched import watched
from tests.fakes.process import ROOT

SECONDS = 150.0

if __name__ == "__main__":
    seconds = float(sys.argv[1]) if sys.argv[1:] else SECONDS
    out = Path(sys.argv[2]) if sys.argv[2:] else ROOT / "docs/images"
    with tempfile.TemporaryDirectory() as folder, watched(Path(folder), seconds) as seen:
        for path in DASHBOARDS:
            draw(path, lambda expr: seen.query_range(filled(expr)), out / f"dashboard-{path.stem}.png")
