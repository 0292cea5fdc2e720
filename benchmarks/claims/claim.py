"""A claim: what was said, what was measured, and whether the two agree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from sim.results import Estimate, aligned, estimate, ratio


class Verdict(StrEnum):
    """Whether the model shows what was claimed."""

    REPRODUCED = "reproduced"
    """The mean is within what was claimed (20 % beside it when one number was given)."""
    PARTLY = "partly"
    """The direction is right, beyond chance; the size is not."""
    NOT = "not"


@dataclass(frozen=True, slots=True)
class Line:
    """One figure of a claim."""

    what: str
    claimed: str
    found: Estimate
    least: float
    """The least and the most that agree with the claim."""
    most: float
    without: float | None = None
    """The value when there is nothing to the claim; None when there is none such."""

    @property
    def verdict(self) -> Verdict:
        """By the mean; the interval has to be clear of "nothing to it"."""
        found = self.found
        within = self.least <= found.mean <= self.most
        if self.without is None:
            return Verdict.REPRODUCED if within else Verdict.NOT
        more = self.least + self.most > 2 * self.without
        if not (found.low > self.without if more else found.high < self.without):
            return Verdict.NOT
        return Verdict.REPRODUCED if within else Verdict.PARTLY


@dataclass(frozen=True, slots=True)
class Claim:
    """What is printed of a claim."""

    title: str
    lines: Sequence[Line]
    details: Sequence[Sequence[str]] = field(default=())
    """A second table, with its head."""

    def markdown(self) -> Iterator[str]:
        """A heading and one table or two."""
        yield f"### {self.title}\n"
        rows = [[line.what, line.claimed, interval(line.found), line.verdict] for line in self.lines]
        yield from aligned([["", "claimed", "measured", "verdict"], *rows])
        if self.details:
            yield ""
            yield from aligned(self.details)
        yield ""


def interval(found: Estimate) -> str:
    """With both ends, as that of a ratio is not symmetric."""
    mean, low, high = (str(Estimate(value, value, value, 1)) for value in (found.mean, found.low, found.high))
    return mean if found.values < 2 else f"{mean} ({low} to {high})"


def about(claimed: float) -> tuple[float, float]:
    """The values that agree with a claim of one number."""
    return 0.8 * claimed, 1.2 * claimed


def times(values: Sequence[float], base: Sequence[float]) -> Estimate:
    """How many times the base, paired by seed. 0 when a value is 0."""
    return ratio(values, base) or estimate([0.0])
