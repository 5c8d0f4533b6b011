"""Comparison: the elements that differ, their places, the bits, and one factor that explains all differences."""

from __future__ import annotations

import math

import pytest
import torch

from mgpu_check.numerics.differences import difference, flipped_bits
from mgpu_check.numerics.factors import common_factor


def test_equal_tensors_do_not_differ() -> None:
    nan, inf = torch.nan, torch.inf
    values = torch.tensor([1.0, -0.0, nan, inf, -inf])
    assert difference(values, torch.tensor([1.0, 0.0, nan, inf, -inf])) is None
    assert difference(torch.empty(0, 3), torch.empty(0, 3)) is None


@pytest.mark.parametrize(
    ("got", "expected"),
    [(torch.nan, 1.0), (1.0, torch.nan), (torch.inf, 1.0), (torch.inf, -torch.inf), (1.0, torch.inf), (1.0, 1.0000001)],
)
def test_values_that_differ(got, expected) -> None:
    found = difference(torch.tensor([got, 0.0]), torch.tensor([expected, 0.0], dtype=torch.float32))
    assert found is not None
    assert (found.count, found.worst) == (1, (0,))


def test_nan_is_within_no_tolerance() -> None:
    found = difference(torch.tensor([torch.nan]), torch.tensor([1.0]), 1e30)
    assert found is not None


def test_the_worst_is_what_is_furthest_over_its_tolerance() -> None:
    expected = torch.zeros(2, 3)
    got = torch.tensor([[0.0, 5.0, 0.0], [0.0, 0.2, 0.0]])
    found = difference(got, expected, torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.001, 1.0]]))
    assert found is not None
    assert (found.worst, found.first, found.last, found.count, found.total) == ((1, 1), (0, 1), (1, 1), 2, 6)
    assert "element [1, 1]: got 0.200000003, expected 0 ± 0.001; 2 of 6 elements differ" in str(found)


def test_layout_and_dtype_of_integers_do_not_matter() -> None:
    values = torch.arange(6, dtype=torch.int64).reshape(2, 3)
    assert difference(values.t().contiguous().t(), values.to(torch.int32)) is None
    big = torch.tensor([2**60 + 1])
    found = difference(big, torch.tensor([2**60]))
    assert found is not None, "compared as float64, which cannot tell them apart"
    assert found.got == 2**60 + 1


def test_shapes_must_be_equal() -> None:
    with pytest.raises(ValueError, match=r"got has shape \(2,\), expected \(2, 1\)"):
        difference(torch.zeros(2), torch.zeros(2, 1))


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.int64]
)
def test_flipped_bits(dtype) -> None:
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    expected = torch.arange(1, 13).reshape(3, 4).to(dtype)
    for bit in (0, 3, 8 * dtype.itemsize - 1):
        got = expected.clone()
        one = 1 << bit if bit < 8 * dtype.itemsize - 1 else -(1 << bit)
        got.view(integer)[2, 1] ^= one
        assert flipped_bits(got, expected) == [((2, 1), bit)]
    assert flipped_bits(expected, expected) == []
    assert flipped_bits(expected + 3, expected) == []


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
