"""Estimates over seeds, and the report."""

from __future__ import annotations

import re
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim import report, results
from sim.cli import main
from sim.figures import FIGURES
from sim.jobs import Candidate, Job, Result, run
from sim.scenario_file import find
from tests.fakes.process import ROOT

positive = st.floats(1e-3, 1e6)


def test_the_interval_of_a_known_sample() -> None:
    """R: t.test(c(1, 2, 4, 7))$conf.int gives -0.7016 and 7.7016."""
    found = results.estimate([1.0, 2.0, 4.0, 7.0])
    assert (found.mean, found.low, found.high) == pytest.approx((3.5, -0.7016, 7.7016), abs=0.01)


def test_one_value_has_no_interval() -> None:
    assert str(results.estimate([2.5])) == "2.50"
    assert str(results.estimate([1234.0])) == "1,234"


@given(st.lists(positive, min_size=1, max_size=40), st.floats(0.1, 10.0))
def test_the_ratio_of_what_is_a_multiple_is_that_factor(base: list[float], factor: float) -> None:
    found = results.ratio([factor * value for value in base], base)
    assert found is not None
    assert (found.mean, found.low, found.high) == pytest.approx((factor, factor, factor), rel=1e-6)


@given(st.lists(st.tuples(positive, positive), min_size=2, max_size=40))
def test_a_ratio_and_its_inverse_agree(pairs: list[tuple[float, float]]) -> None:
    values, base = ([pair[side] for pair in pairs] for side in (0, 1))
    there, back = results.ratio(values, base), results.ratio(base, values)
    assert there is not None
    assert back is not None
    assert there.mean * back.mean == pytest.approx(1.0)
    assert there.low * back.high == pytest.approx(1.0)


def test_there_is_no_ratio_to_nothing() -> None:
    assert results.ratio([1.0, 2.0], [1.0, 0.0]) is None


# The report


@pytest.fixture(scope="module")
def compared() -> list[Result]:
    changes = {
        "fleet.count": 4,
        "warm_up_s": 50,
        "measured_s": 250,
        "events": [{"kind": "scale_out", "at_s": 150, "share": 0.5}],
    }
    scenario = find("r95", changes)
    return [run(Job(scenario, Candidate(policy), 1)) for policy in ("rendezvous", "round_robin")]


class _Page(HTMLParser):
    """What a page refers to, and the names in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.outside: list[str] = []
        self.ids: list[str] = []
        self.inside: set[str] = set(re.findall(r"url\(#([^)]+)\)", text))
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "xlink:href", "data", "srcset") and value:
                if value.startswith("#"):
                    self.inside.add(value[1:])
                elif not value.startswith("data:"):
                    self.outside.append(value)
        if tag in ("script", "link", "iframe"):
            self.outside.append(tag)


def test_the_page_needs_nothing_else_and_says_everything(compared: list[Result], tmp_path: Path) -> None:
    report.write(compared, tmp_path / "report.html", None)
    text = unescape((tmp_path / "report.html").read_text())
    page = _Page(text)
    assert page.outside == []
    assert "@import" not in text
    assert len(page.ids) == len(set(page.ids)), "pictures do not mix up their parts"
    assert page.inside <= set(page.ids)
    assert text.count("<svg") == 3
    for result in compared:
        assert result.job.candidate.label in text
    assert all(figure.meaning in text for figure in FIGURES)
    assert find("r95").about.split("`")[-1].strip() in text


def test_equal_runs_give_equal_pages(compared: list[Result], tmp_path: Path) -> None:
    for name in ("a", "b"):
        report.write(compared, tmp_path / name, None)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_pictures_of_a_comparison(compared: list[Result], tmp_path: Path) -> None:
    report.write(compared, None, tmp_path / "new/pictures")
    made = {path.name: path.read_bytes() for path in (tmp_path / "new/pictures").iterdir()}
    assert set(made) == {"ttft-r95.png", "load-r95.png", "scale-out-r95.png"}
    assert all(data.startswith(b"\x89PNG") for data in made.values())


def test_pictures_of_a_sweep(tmp_path: Path) -> None:
    arguments = [
        "sweep",
        "r80,nohost80",
        "--vary",
        "load=0.2,0.6",
        "--policies",
        "random",
        "--seeds",
        "1",
        "--jobs",
        "1",
    ]
    quick = ["--set", "fleet.count=2", "--set", "warm_up_s=10", "--set", "measured_s=30"]
    assert main([*arguments, *quick, "--png", str(tmp_path), "--html", str(tmp_path / "report.html")]) == 0
    assert {path.name for path in tmp_path.glob("*.png")} == {
        "hit-rate.png",
        "ttft-by-concurrency.png",
        "throughput.png",
    }
    assert (tmp_path / "report.html").read_text().count("<svg") == 3


def test_pictures_of_a_sweep_over_something_else_are_told_apart(tmp_path: Path) -> None:
    sweep = ["sweep", "r80", "--vary", "gap_cap_s=0.5,300", "--policies", "random", "--seeds", "1", "--jobs", "1"]
    quick = ["--set", "fleet.count=2", "--set", "warm_up_s=10", "--set", "measured_s=30"]
    assert main([*sweep, *quick, "--png", str(tmp_path), "--html", str(tmp_path / "report.html")]) == 0
    assert {path.name for path in tmp_path.glob("*.png")} == {
        *("ttft-r80-gap_cap_s-0-5.png", "ttft-r80-gap_cap_s-300.png"),
        *("load-r80-gap_cap_s-0-5.png", "load-r80-gap_cap_s-300.png"),
    }
    page = _Page((tmp_path / "report.html").read_text())
    assert len(page.ids) == len(set(page.ids))


@pytest.mark.parametrize("changes", [{"measured_s": 0.5}, {"events": [{"kind": "crash", "at_s": 0.0}]}], ids=str)
def test_a_run_that_never_saw_a_replica_has_no_picture_of_their_load(
    changes: dict[str, object], tmp_path: Path
) -> None:
    scenario = find("r80", {"fleet.count": 1, "warm_up_s": 0, "measured_s": 30, **changes})
    report.write([run(Job(scenario, Candidate("random"), 1))], tmp_path / "report.html", None)
    assert (tmp_path / "report.html").read_text().count("<svg") == 1


def test_without_matplotlib_the_remedy_is_told_before_anything_is_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(report, "find_spec", lambda name: None)
    assert main(["compare", "r80", "--png", str(tmp_path), "--seeds", "1-1000"]) == 2
    assert capsys.readouterr().err == "warmroute sim: pictures need matplotlib: pip install 'warmroute[plots]'\n"


def test_the_documentation_tells_every_figure() -> None:
    section = (ROOT / "docs/simulator.md").read_text().split("\n## Figures\n", 1)[1].split("\n## ", 1)[0]
    told = [
        tuple(cell.strip() for cell in row)
        for row in re.findall(r"^\| `([^`]+)` \| ([^|]+) \| ([^|]+) \|", section, re.M)
    ]
    assert told == [(figure.key, figure.title, figure.meaning) for figure in FIGURES]
