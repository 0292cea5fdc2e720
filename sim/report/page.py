"""The report as one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from sim import results
from sim.figures import FIGURES
from sim.jobs import Result
from sim.report.plots import Picture, as_svg

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 64rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }
th, td { padding: 0.25rem 0.75rem; text-align: left; border-bottom: 1px solid #ddd; }
figure { margin: 1.5rem 0; } svg { max-width: 100%; height: auto; }
figcaption, .small { color: #555; font-size: 0.9em; }
"""


def render(found: Sequence[Result], pictures: Sequence[Picture]) -> str:
    """Pictures, tables and what the figures mean."""
    names = ", ".join(dict.fromkeys(result.job.scenario.name for result in found))
    policies = ", ".join(dict.fromkeys(result.job.candidate.label for result in found))
    title = f"{names}: {policies}"
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>",
            f"<h1>{escape(title)}</h1>",
            *_about(found),
            *(
                f"<figure>{as_svg(picture)}<figcaption>{escape(picture.caption)}</figcaption></figure>"
                for picture in pictures
            ),
            "<h2>Figures</h2>",
            '<p class="small">Means and 95 % intervals over seeds; a ratio is to the first policy, on the same '
            "sessions (geometric mean of pairs).</p>",
            *(line for title, rows in results.tables(found) for line in _table(title, rows)),
            "<h2>What they mean</h2><dl>",
            *(f"<dt>{escape(each.title)}</dt><dd>{escape(each.meaning)}</dd>" for each in FIGURES),
            "</dl></body></html>",
        ]
    )


def _about(found: Sequence[Result]) -> Iterator[str]:
    yield "<ul>"
    for about in dict.fromkeys((result.job.scenario.name, result.job.scenario.about) for result in found):
        yield f"<li><b>{escape(about[0])}</b>: {escape(about[1])}</li>"
    yield "</ul>"


def _table(title: str, rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"<h3>{escape(title)}</h3><table>"
    for number, row in enumerate(rows):
        cell = "td" if number else "th"
        yield "<tr>" + "".join(f"<{cell}>{escape(text)}</{cell}>" for text in row) + "</tr>"
    yield "</table>"
