"""`python -m deploy.dashboards [FOLDER]`: writes each dashboard's JSON, beside this when no folder is given."""

from __future__ import annotations

import sys
from pathlib import Path

from deploy.dashboards.written import written

if __name__ == "__main__":
    folder = Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).parent
    for name, text in written().items():
        (folder / f"{name}.json").write_text(text)
