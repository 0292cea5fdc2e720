"""The published claims: each can be measured, and docs/claims.md shows what the code measures."""

from __future__ import annotations

import re

import pytest

from benchmarks.claims.__main__ import CLAIMS
from benchmarks.claims.claim import Claim, Line, Verdict
from benchmarks.claims.cpd import sustained
from benchmarks.claims.play import Setting
from sim.results import Estimate, estimate
from tests.fakes.process import ROOT

PAGE = (ROOT / "docs/claims.md").read_text(encoding="utf-8")


def told(title: str) -> list[list[str]]:
    """The first table under a heading of the page, without its head."""
    section = PAGE.split(f"### {title}\n", 1)[1].split("\n### ", 1)[0]
    (table, *_) = re.findall(r"((?:^\|.*\n)+)", section, re.M)
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]


@pytest.mark.parametrize("name", CLAIMS)
def test_every_claim_can_be_measured_and_the_page_has_its_lines(name: str) -> None:
    claim = CLAIMS[name](Setting(seeds=(71,), time=0.01))
    text = list(claim.markdown())
    assert text[0] == f"### {claim.title}\n"
    assert all(line.count("|") == text[1].count("|") for line in text[1 : 2 + len(claim.lines)])
    page = told(claim.title)
    # What a line is called may tell what was best in the run.
    assert [row[1] for row in page] == [line.claimed for line in claim.lines]
    assert {row[3] for row in page} <= set(Verdict)


def test_the_page_tells_how_to_make_it_again() -> None:
    assert "`python -m benchmarks.claims`" in PAGE
    (table,) = re.findall(r"((?:^\| `.*\n)+)", PAGE, re.M)
    assert re.findall(r"^\| `(\w+)`", table, re.M) == list(CLAIMS)


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (Estimate(2.8, 2.5, 3.1, 4), Verdict.REPRODUCED),
        (Estimate(2.8, 0.9, 4.7, 4), Verdict.NOT),
        (Estimate(1.2, 1.1, 1.3, 4), Verdict.PARTLY),
        (Estimate(8.0, 7.0, 9.0, 4), Verdict.PARTLY),
        (Estimate(0.7, 0.6, 0.8, 4), Verdict.NOT),
    ],
)
def test_verdicts(found: Estimate, verdict: Verdict) -> None:
    assert Line("", "", found, 2.24, 3.36, 1.0).verdict is verdict


def test_a_verdict_of_a_smaller_figure() -> None:
    assert Line("", "", estimate([0.4, 0.42]), 0.0, 0.5, 1.0).verdict is Verdict.REPRODUCED
    assert Line("", "", Estimate(0.7, 0.6, 0.8, 4), 0.0, 0.5, 1.0).verdict is Verdict.PARTLY
    assert Line("", "", Estimate(1.5, 1.4, 1.6, 4), 0.0, 0.5, 1.0).verdict is Verdict.NOT


def test_without_a_neutral_value_there_is_no_part_of_a_claim() -> None:
    assert Line("", "", estimate([5.0]), 5.0, 7.0).verdict is Verdict.REPRODUCED
    assert Line("", "", estimate([4.0]), 5.0, 7.0).verdict is Verdict.NOT


def test_a_claim_without_details_is_one_table() -> None:
    text = list(Claim("t", [Line("w", "c", estimate([1.0, 2.0, 3.0]), 0.0, 9.0)]).markdown())
    assert text[-2] == "| w | c       | 2 (-0.483 to 4.48) | reproduced |"


def test_what_is_sustained_is_between_the_loads_that_were_tried() -> None:
    rows = [{"requests_per_s": rate, "ttft_p99_s": wait} for rate, wait in ((1.0, 1.0), (2.0, 4.0), (3.0, 9.0))]
    assert sustained(rows, {"ttft_p99_s": 2.0}) == pytest.approx(1.5)
    assert sustained(rows, {"ttft_p99_s": 4.0}) == pytest.approx(2.0)
    assert sustained(rows, {"ttft_p99_s": 10.0}) == 3.0
    assert sustained(rows, {"ttft_p99_s": 0.5}) == 1.0
