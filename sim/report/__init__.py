"""Reports of runs: one HTML file with everything inside, or PNG files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from sim.jobs import Result


def check(html: Path | None, png: Path | None) -> None:
    """Before anything is run. Raises ValueError with the remedy when matplotlib or the place to write to is missing."""
    if html is None and png is None:
        return
    if find_spec("matplotlib") is None:
        raise ValueError("pictures need matplotlib: pip install 'warmroute[plots]'")
    if html is not None and not html.parent.is_dir():
        raise ValueError(f"--html {html}: there is no folder {html.parent}: create it first")
    if html is not None and html.is_dir():
        raise ValueError(f"--html {html}: is a folder: name a file in it")
    if html is not None and not os.access(html if html.exists() else html.parent, os.W_OK):
        raise ValueError(f"--html {html}: cannot be written: choose another place")
    if png is not None and png.exists() and not png.is_dir():
        raise ValueError(f"--png {png}: is not a folder: name one, or one that does not exist yet")


def write(results: Sequence[Result], html: Path | None, png: Path | None) -> None:
    """Writes what is asked for."""
    if html is None and png is None:
        return
    # Here, as matplotlib is slow to import and need not be installed.
    from sim.report import page, plots

    pictures = list(plots.pictures(results))
    if html is not None:
        _save(html, page.render(results, pictures).encode())
    if png is not None:
        png.mkdir(parents=True, exist_ok=True)
        for picture in pictures:
            _save(png / f"{picture.name}.png", plots.as_png(picture))


def _save(path: Path, data: bytes) -> None:
    """Raises OSError with the path, also where the disk is full."""
    try:
        path.write_bytes(data)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
