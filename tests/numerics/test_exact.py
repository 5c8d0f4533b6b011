"""Exact data: every order of a reduction gives the same bits, and checks recognise such data."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mgpu_check.numerics.reduction import exact_factors, exact_parts, random_parts, sums_exactly

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
dtypes = st.sampled_from(FLOATS + INTEGERS)
counts = st.integers(1, 24)
seeds = st.integers(0, 10**6)


def _folded(parts: list[torch.Tensor], order: list[int], operation: str) -> torch.Tensor:
    total = parts[order[0]].clone()
    for index in order[1:]:
        total = total + parts[index] if operation == "sum" else total * parts[index]
    return total


@given(dtypes, counts, seeds, st.randoms(use_true_random=False))
def test_sums_are_the_same_bits_in_every_order(dtype, count, seed, random) -> None:
    parts = exact_parts((3, 7), dtype, count=count, seed=seed)
    orders = [random.sample(range(count), count) for _ in range(4)]
    sums = [_folded(parts, order, "sum") for order in orders]
    assert all(torch.equal(sums[0], other) for other in sums)
    # The right bits, not only the same ones: Python's integers and fractions do not round.
    exact = [sum(map(Fraction, values)) for values in zip(*(part.flatten().tolist() for part in parts), strict=True)]
    assert sums[0].flatten().tolist() == exact


@given(dtypes, st.integers(1, 12), seeds, st.randoms(use_true_random=False))
def test_products_are_the_same_bits_in_every_order(dtype, count, seed, random) -> None:
    parts = exact_factors((13,), dtype, count=count, seed=seed)
    products = [_folded(parts, random.sample(range(count), count), "product") for _ in range(4)]
    assert all(torch.equal(products[0], other) for other in products)
    assert products[0].double().isfinite().all()
    assert (products[0] != 0).all()


@given(st.sampled_from((torch.float64, torch.float32, torch.int64)), st.integers(2, 8), seeds)
def test_values_are_distinct(dtype, count, seed) -> None:
    parts = torch.stack(exact_parts((40,), dtype, count=count, seed=seed))
    assert all(len(set(column)) == count for column in parts.t().tolist()), "two ranks hold the same value"
    assert all(len(set(row)) == len(row) for row in parts.tolist()), "a rank holds a value twice"
    assert (parts != 0).all()


def test_values_fill_the_significand() -> None:
    """Else accumulation in a narrower dtype would go unseen."""
    parts = exact_parts((50,), torch.float32, count=4, seed=0)
    assert not torch.equal(
        sum(parts[1:], parts[0]), sum((part.bfloat16() for part in parts[1:]), parts[0].bfloat16()).float()
    )
    assert not any(torch.equal(part, part.bfloat16().float()) for part in parts)


@given(st.sampled_from(FLOATS), counts, seeds)
def test_exact_data_are_recognised(dtype, count, seed) -> None:
    assert sums_exactly(exact_parts((9,), dtype, count=count, seed=seed)).all()


@given(st.sampled_from(FLOATS), st.integers(3, 9), seeds)
def test_what_is_called_exact_is(dtype, count, seed) -> None:
    parts = random_parts((40,), dtype, count=count, seed=seed)
    exact = sums_exactly(parts)
    forward, backward = (_folded(parts, order, "sum") for order in (list(range(count)), list(range(count))[::-1]))
    assert torch.equal(forward[exact], backward[exact])


def test_random_data_are_not_called_exact() -> None:
    assert not sums_exactly(random_parts((200,), torch.float32, count=4, seed=0)).any()


def test_special_values() -> None:
    parts = [torch.tensor([torch.nan, torch.inf, 0.0, 1.0]), torch.tensor([1.0, 1.0, 0.0, 2.0**-30])]
    assert sums_exactly(parts).tolist() == [False, False, True, False]


@pytest.mark.parametrize(("dtype", "count"), [(torch.bfloat16, 256), (torch.int8, 128), (torch.float32, 0)])
def test_refuses_what_cannot_be_exact(dtype, count) -> None:
    with pytest.raises(ValueError, match=f"count={count}"):
        exact_parts((3,), dtype, count=count, seed=0)


@given(dtypes, st.integers(1, 4), seeds)
def test_data_depend_on_the_seed_only(dtype, count, seed) -> None:
    for make in (exact_parts, exact_factors, random_parts):
        first, second = (make((2, 3), dtype, count=count, seed=seed) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        assert all(part.shape == (2, 3) and part.dtype == dtype for part in first)
