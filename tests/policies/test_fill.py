"""The static fill of the benchmarks: 250 equal sessions on 50 replicas. Its figures, and the plot that shows them."""

from __future__ import annotations

import pytest

from benchmarks.fill import fill, svg
from policies.registry import POLICIES
from tests.fakes.process import ROOT


@pytest.mark.parametrize("policy", ["session_affinity", "sticky", "least_loaded", "round_robin"])
def test_every_replica_gets_the_same(policy: str) -> None:
    found = fill(policy)
    assert (found.max_over_mean, found.worst, found.least, found.most) == (1.0, 1.0, 5, 5)


@pytest.mark.parametrize("policy", ["rendezvous", "consistent_hash", "random"])
def test_by_chance_the_fullest_gets_twice_the_mean_and_some_get_nothing(policy: str) -> None:
    """The placement study found 2.20 for rendezvous over 12 fills of its own."""
    found = fill(policy)
    assert found.max_over_mean == pytest.approx(2.2, abs=0.25)
    assert found.least == 0


def test_the_bound_on_loads_is_reached_and_never_exceeded() -> None:
    """125 percent of 5 sessions, rounded up to 7: 1.4 times the mean."""
    found = fill("bounded_load")
    assert found.max_over_mean == pytest.approx(1.4, abs=0.05)
    assert found.worst <= 1.4


@pytest.mark.parametrize("policy", ["power_of_two", "dual_choice"])
def test_two_choices_are_far_more_even_than_one(policy: str) -> None:
    """The study found 1.40 for two choices."""
    found = fill(policy)
    assert found.max_over_mean == pytest.approx(1.35, abs=0.1)
    assert found.worst <= 1.6


def test_the_plot_in_the_documentation_shows_these_figures() -> None:
    drawn = svg([fill(policy) for policy in POLICIES])
    assert drawn == (ROOT / "docs/images/fill.svg").read_text(), "python -m benchmarks.fill --svg docs/images/fill.svg"
    assert "(images/fill.svg)" in (ROOT / "docs/policies.md").read_text()
