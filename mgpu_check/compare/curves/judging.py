"""Judge whether two sides of a comparison part beyond what runs of the same side part.

Each side has the curves of some runs, which differ by chance alone: by seeds, or by rounding. The steps are divided
into spans of 1, 2, 4, 8, … steps. In each span a curve has one number, its mean. If all runs are right, these numbers
have the same mean on both sides, and the t statistic of the two sides has Student's distribution with as many degrees
of freedom as there are repeats. A difference counts if chance exceeds it in any span with a probability of at most
`ALARM` (Bonferroni): each length gets an equal part, divided equally among the spans of this length. So single
steps show a large difference, and long spans a small one that lasts.

The rule assumes that right runs are spread normally. Outliers in one run make the t statistic smaller, not larger. So
only outliers that several runs of one side share by chance look like a difference: if 3 % of the steps have outliers,
5 of 1000 comparisons of three runs with three. If one side has a single run, there is no verdict.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

ALARM = 1e-3
"""Probability that a comparison of right runs reports a difference."""
_HIDES = 0.5
"""Relative to the progress of the loss: a wider tolerance would hide that half of the training has no effect."""
_Number = TypeVar("_Number", int, float)
_NEAR = 1e-3
"""Relative: a factor this close to an integer, or to its inverse, is that."""


@dataclass(frozen=True)
class RunCurve:
    """The curve of one run: step -> value."""

    name: str
    values: Mapping[int, float]


@dataclass(frozen=True)
class Side:
    """One of the two things that are compared: a name, and the curves of its runs."""

    name: str
    curves: Sequence[RunCurve]

    def __str__(self) -> str:
        return f"{self.name} ({len(self.curves)} run{'s' * (len(self.curves) != 1)})"


@dataclass(frozen=True)
class Span:
    """Some consecutive compared steps.

    Attributes:
        first, last: the first and the last step.
        means: mean over the runs of each side.
        spread: standard deviation of runs of the same side; None if no run was repeated.
        tolerance: how far the means of right runs may part; None if no run was repeated.
        length: number of steps.
    """

    first: int
    last: int
    means: tuple[float, float]
    spread: float | None
    tolerance: float | None
    length: int

    @property
    def apart(self) -> float:
        return abs(self.means[1] - self.means[0])

    @property
    def excess(self) -> float:
        """How many tolerances the sides are apart; 0 without a tolerance."""
        return self.apart / self.tolerance if self.tolerance else 0.0

    def __str__(self) -> str:
        return f"step {self.first}" if self.length == 1 else f"steps {self.first} to {self.last}"


@dataclass
class CurveComparison:
    """Two sides, span by span.

    Attributes:
        steps: the steps that all curves have with finite values.
        levels: the spans of 1, 2, 4, … steps.
        freedom: degrees of freedom; 0 if no run was repeated.
        alike: for each side, how many of its curves repeat another curve in each digit, and were left out.
        infinite: the first common step with a value that is not finite, and for each side the number of curves with
            such a value there or later.
        uncommon: number of steps that only some curves have.
    """

    sides: tuple[Side, Side]
    steps: list[int]
    levels: list[list[Span]] = field(default_factory=list)
    freedom: int = 0
    alike: tuple[int, int] = (0, 0)
    infinite: tuple[int, tuple[int, int]] | None = None
    uncommon: int = 0

    @property
    def parted(self) -> Span | None:
        """The span beyond its tolerance that ends first, the shortest of several; else None."""
        beyond = [span for spans in self.levels for span in spans if span.excess > 1]
        return min(beyond, key=lambda span: (span.last, span.length), default=None)

    @property
    def rows(self) -> list[Span]:
        """Spans that double in length and cover all steps: 1, 2, 3 to 4, 5 to 8, …"""
        return [spans[1 if number else 0] for number, spans in enumerate([*self.levels[:1], *self.levels[:-1]])]

    @property
    def telling(self) -> list[Span]:
        """The rows whose tolerance is small beside the progress of the first side."""
        means = [span.means[0] for span in self.rows]
        most = _HIDES * (max(means, default=0.0) - min(means, default=0.0))
        return [span for span in self.rows if span.tolerance is not None and span.tolerance <= most]

    @property
    def factor(self) -> float | None:
        """The factor between the sides, an integer or its inverse, if they part, and would not part without it."""
        if self.parted is None or not self.freedom:
            return None
        pairs = [span.means for span in self.levels[0]]
        squares = math.fsum(one * one for one, _ in pairs)
        fitted = math.fsum(one * other for one, other in pairs) / squares if squares else 0.0
        if not 1e-6 < fitted < 1e6:
            return None
        factor = round(fitted) if fitted > 1 else 1 / round(1 / fitted)
        if factor == 1 or abs(factor / fitted - 1) > _NEAR:
            return None
        one, other = self.sides
        scaled = [RunCurve(c.name, {s: c.values[s] / factor for s in self.steps}) for c in other.curves]
        cut = [RunCurve(c.name, {s: c.values[s] for s in self.steps}) for c in one.curves]
        return factor if judge(replace(one, curves=cut), replace(other, curves=scaled)).parted is None else None


def judge(one: Side, other: Side, alarm: float = ALARM) -> CurveComparison:
    """Compare the curves of two sides.

    Args:
        alarm: see `ALARM`.
    """
    curves = [*one.curves, *other.curves]
    known = [curve.values.keys() for curve in curves]
    common = sorted(functools.reduce(lambda a, b: a & b, known, set(known[0]) if known else set()))
    made = CurveComparison((one, other), common, uncommon=len(set().union(*known)) - len(common))
    for number, step in enumerate(common):
        if not all(math.isfinite(curve.values[step]) for curve in curves):
            rest = common[number:]
            off = [sum(not all(math.isfinite(c.values[s]) for s in rest) for c in side.curves) for side in made.sides]
            made.infinite, made.steps = (step, (off[0], off[1])), common[:number]
            break
    rows = [_distinct([[c.values[step] for step in made.steps] for c in side.curves]) for side in made.sides]
    made.alike = (len(one.curves) - len(rows[0]), len(other.curves) - len(rows[1]))
    made.freedom = sum(map(len, rows)) - 2
    if made.steps:
        made.levels = list(_levels(made.steps, rows[0], rows[1], alarm))
    return made


def _distinct(rows: Sequence[list[float]]) -> list[list[float]]:
    """Return the curves that differ in some digit: where nothing was varied, there is no spread to measure."""
    return [list(row) for row in dict.fromkeys(map(tuple, rows))]


def _levels(
    steps: Sequence[int], one: list[list[float]], other: list[list[float]], alarm: float
) -> Iterator[list[Span]]:
    sums, counts = [list(row) for row in (*one, *other)], [1] * len(steps)
    depth = math.ceil(math.log2(len(steps))) + 1
    absolute, relative = _grain(sums)
    freedom = len(sums) - 2
    share = math.sqrt(1 / len(one) + 1 / len(other))
    for _ in range(depth):
        reach = quantile(freedom, alarm / depth / len(counts)) if freedom else math.inf
        spans, end = [], 0
        for index, count in enumerate(counts):
            means = [row[index] / count for row in sums]
            sides = means[: len(one)], means[len(one) :]
            centres = statistics.fmean(sides[0]), statistics.fmean(sides[1])
            spread = tolerance = None
            if freedom:
                squares = ((x - centre) ** 2 for some, centre in zip(sides, centres, strict=True) for x in some)
                spread = math.sqrt(math.fsum(squares) / freedom)
                grain = max(absolute, relative * max(map(abs, centres)))
                tolerance = reach * share * math.hypot(spread, grain / math.sqrt(12)) + grain
            start, end = end, end + count
            spans.append(Span(steps[start], steps[end - 1], centres, spread, tolerance, count))
        yield spans
        sums, counts = [_paired(row) for row in sums], _paired(counts)


def _paired(numbers: Sequence[_Number]) -> list[_Number]:
    """Return the sums of neighbours."""
    return [sum(numbers[index : index + 2]) for index in range(0, len(numbers), 2)]


def _grain(rows: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return the smallest distance of two values, and the smallest one relative to the values.

    Curves have few digits: those of a log, or of the dtype of the loss. Equal digits hide a spread of this size.
    """
    values = sorted({value for row in rows for value in row})
    pairs = list(itertools.pairwise(values))
    absolute = min((b - a for a, b in pairs), default=0.0)
    relative = min(((b - a) / max(abs(a), abs(b)) for a, b in pairs), default=0.0)
    return absolute, relative


def quantile(freedom: int, probability: float) -> float:
    """Return the value that the absolute value of Student's t exceeds with a probability."""
    low, high = 0.0, 1.0
    while _exceeded(high, freedom) > probability and high < 1e15:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _exceeded(middle, freedom) > probability else (low, middle)
    return high


def _exceeded(t: float, freedom: int) -> float:
    """Return the probability that the absolute value of Student's t exceeds `t`.

    The finite sums are 26.7.3 and 26.7.4 of M. Abramowitz and I. A. Stegun, *Handbook of Mathematical Functions*.
    """
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term = cosine if odd else 1.0
    total = 0.0 if freedom == 1 else term
    for number in range(3 if odd else 2, freedom - 1, 2):
        term *= cosine**2 * (number - 1) / number
        total += term
    return 1 - (2 / math.pi * (angle + sine * total) if odd else sine * total)
