"""Bounds: right numbers, never exceeded by a right sum, exceeded by one of too little precision."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mgpu_check.numerics.reduction import compensated_sum, random_parts, reduced, unit_roundoff
from mgpu_check.numerics.steps import envelopes, estimate

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def test_integers_do_not_round() -> None:
    with pytest.raises(ValueError, match=r"torch\.int32"):
        unit_roundoff(torch.int32)


@given(st.sampled_from(FLOATS), st.integers(1, 40), st.integers(0, 10**6), st.randoms(use_true_random=False))
def test_right_sums_are_within_the_bound(dtype, count, seed, random) -> None:
    parts = random_parts((60,), dtype, count=count, seed=seed)
    should = reduced(parts)
    total = torch.zeros_like(parts[0])
    for index in random.sample(range(count), count):
        total = total + parts[index]
    assert ((total.double() - should.value).abs() <= should.tolerance).all()


@given(
    st.sampled_from(((torch.float64, torch.float32), (torch.float32, torch.float16), (torch.float32, torch.bfloat16))),
    st.integers(2, 8),
    st.integers(0, 10**6),
)
def test_sums_in_less_precision_are_not(pair, count, seed) -> None:
    dtype, narrow = pair
    parts = random_parts((60,), dtype, count=count, seed=seed)
    should = reduced(parts)
    total = sum((part.to(narrow) for part in parts[1:]), parts[0].to(narrow)).double()
    assert ((total - should.value).abs() > should.tolerance).double().mean() > 0.9


@given(st.integers(1, 30), st.integers(0, 10**6))
def test_the_reference_of_float64_sums_is_more_exact_than_float64(count, seed) -> None:
    from fractions import Fraction

    parts = random_parts((5,), torch.float64, count=count, seed=seed)
    got = compensated_sum(parts)
    for index in range(5):
        exact = sum((Fraction(part[index].item()) for part in parts), Fraction())
        size = sum((abs(Fraction(part[index].item())) for part in parts), Fraction())
        assert abs(Fraction(got[index].item()) - exact) <= abs(exact) * Fraction(2, 2**53) + size * Fraction(
            count**2, 2**100
        )


def test_compensated_sum_keeps_infinities_and_nan() -> None:
    inf, nan = torch.inf, torch.nan
    parts = [torch.tensor([inf, inf, nan, 1.0]), torch.tensor([1.0, -inf, 1.0, 1e300], dtype=torch.float64)]
    got = compensated_sum(parts)
    assert got[0] == inf
    assert got[1:3].isnan().all()
    assert got[3] == 1e300


@pytest.mark.parametrize(
    ("parts", "operation", "match"),
    [
        ([], "sum", "empty"),
        ([torch.zeros(2), torch.zeros(3)], "sum", "differ in shape or dtype"),
        ([torch.zeros(2), torch.zeros(2, dtype=torch.float64)], "sum", "differ in shape or dtype"),
        ([torch.zeros(2)], "median", "choose one of sum, avg"),
        ([torch.zeros(2, dtype=torch.int32)], "avg", "integers"),
    ],
)
def test_misuse(parts, operation, match) -> None:
    with pytest.raises(ValueError, match=match):
        reduced(parts, operation)


def test_an_element_that_happens_to_be_right_is_granted_what_the_others_are():
    usual = {"w": torch.zeros(2), "none": torch.zeros(0)}
    found = envelopes(usual, [{"w": torch.tensor([4.0, 0.0])}, {"w": torch.tensor([0.0, torch.nan])}])
    assert found.keys() == {"w"}
    assert found["w"].tolist() == pytest.approx([4.0, 8.0**0.5], rel=1e-15)
    assert found["w"].dtype is torch.float64


def test_rows_and_columns_that_move_more_are_granted_more_where_they_cross():
    moved = torch.tensor([[0.0, 4.0], [4.0, 4.0]], dtype=torch.float64)
    mean = 12.0**0.5
    assert estimate(moved).tolist() == [[mean, 4.0], [4.0, 4.0]]
    moved = torch.tensor([[0.0, 8.0], [8.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    raised = estimate(moved, crosswise=True)
    assert raised[0, 0] > raised[2, 0] == estimate(moved)[2, 0]
