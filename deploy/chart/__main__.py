"""`python -m deploy.chart`: writes what of the Helm chart is made from elsewhere."""

from __future__ import annotations

from deploy.chart.written import CHART, written

if __name__ == "__main__":
    for name, text in written().items():
        path = CHART / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
