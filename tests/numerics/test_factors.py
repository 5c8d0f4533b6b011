"""One common factor: found where all elements have it, and not where they only nearly do."""

from __future__ import annotations

import math

import pytest

from mgpu_check.numerics.factors import common_factor, evenly


def of_largest(*pairs: tuple[float, float]) -> float | None:
    return common_factor(pairs, least=1e-2, of_largest=1e-3)


def relative(*pairs: tuple[float, float]) -> float | None:
    return common_factor(pairs, least=1e-3, relative=2e-3)


@pytest.mark.parametrize("find", [of_largest, relative])
def test_a_common_factor(find):
    assert find((2.0, 1.0), (-4.0, -2.0)) == pytest.approx(2)
    assert find((2.0, 1.0), (-4.0, -2.0), (math.inf, 3.0)) == pytest.approx(2)
    assert find((2.0, 1.0), (4.0, -2.0)) is None
    assert find((2.0, 1.0), (3.98, 2.0)) is None
    assert find((1.0, 1.0)) is None
    assert find((0.0, 1.0), (0.0, 2.0)) is None
    assert find((1.0, 0.0)) is None
    assert find() is None


def test_the_slack_is_of_the_largest_number_or_of_each():
    nearly = (200.0, 100.0), (2.1, 1.0)
    assert of_largest(*nearly) == pytest.approx(2, abs=1e-4) and relative(*nearly) is None


def test_as_many_numbers_are_looked_at_as_python_can():
    assert len(range(1000)[evenly(1000)]) == 1000
    assert 50_000 <= len(range(1_234_567)[evenly(1_234_567)]) <= 100_000
