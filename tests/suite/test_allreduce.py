"""`assert_allreduce_matches` passes on right results, and names rank, element and cause of wrong ones."""

from __future__ import annotations

import itertools

import pytest
import torch

from mgpu_check.asserts.collectives import assert_allreduce_matches, assert_contributions_kept
from mgpu_check.errors import AllreduceMismatch
from mgpu_check.numerics.reduction import exact_factors, exact_parts, random_parts

EXACT = exact_parts((4, 5), torch.float32, count=4, seed=1)
RANDOM = random_parts((4, 5), torch.float32, count=4, seed=1)
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def _sum(parts: list[torch.Tensor]) -> torch.Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


@pytest.mark.parametrize("make", [exact_parts, random_parts])
@pytest.mark.parametrize("dtype", [*FLOATS, torch.int8, torch.uint8, torch.int32, torch.int64])
def test_right_sums_pass(make, dtype) -> None:
    for count, shape in itertools.product((1, 2, 3, 7), ((), (0,), (1,), (13,), (2, 0, 3), (3, 4))):
        parts = make(shape, dtype, count=count, seed=3)
        forward, backward = _sum(parts), _sum(parts[::-1])
        assert_allreduce_matches([backward] * count, parts)
        assert_allreduce_matches({0: forward}, parts)


@pytest.mark.parametrize("operation", ["min", "max", "product", "avg"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_right_results_of_other_operations_pass(operation, dtype) -> None:
    for make in (exact_factors, random_parts):
        parts = make((17,), dtype, count=3, seed=2)
        stacked = torch.stack(parts)
        result = {
            "min": stacked.amin(0),
            "max": stacked.amax(0),
            "product": parts[2] * parts[0] * parts[1],
            "avg": (parts[0] / 3 + parts[1] / 3) + parts[2] / 3,
        }[operation]
        assert_allreduce_matches({1: result}, parts, operation=operation)
        with pytest.raises(AllreduceMismatch, match=operation):
            assert_allreduce_matches({1: result * 1.5}, parts, operation=operation)


def test_layout_does_not_matter() -> None:
    total = _sum(EXACT)
    strided = torch.zeros(4, 10)[:, ::2].copy_(total)
    assert_allreduce_matches([total.t().contiguous().t(), strided, total, total], EXACT)


@pytest.mark.parametrize("parts", [EXACT, RANDOM])
def test_names_the_ranks_that_are_wrong(parts) -> None:
    total = _sum(parts)
    with pytest.raises(AllreduceMismatch) as caught:
        assert_allreduce_matches([total, parts[1], total, total - parts[0]], parts, what="ring")
    text = str(caught.value)
    assert caught.value.ranks == (1, 3)
    assert text.startswith("ring: sum of 4 x (4, 5) float32 is wrong on ranks 1, 3 (of 4)")
    assert "rank 1: element" in text
    assert "all elements equal its own part alone" in text
    assert "looks like a sum that misses rank 0" in text


def test_equal_findings_are_folded() -> None:
    total = _sum(EXACT) / 4
    with pytest.raises(AllreduceMismatch, match=r"ranks 0-3: element .* \(1 / world size\)") as caught:
        assert_allreduce_matches([total] * 4, EXACT)
    assert len(str(caught.value).splitlines()) == 2


def test_one_bit_of_exact_data_is_enough() -> None:
    for bit in (0, 12, 31):
        wrong = _sum(EXACT)
        wrong.view(torch.int32)[3, 4] ^= 1 << bit if bit < 31 else -(1 << 31)
        with pytest.raises(
            AllreduceMismatch, match=r"rank 2: element \[3, 4\]: got .*; all other 19 elements are right"
        ):
            assert_allreduce_matches({2: wrong}, EXACT)


def test_accumulation_in_half_precision_is_caught_on_random_data() -> None:
    wrong = _sum([part.half() for part in RANDOM]).float()
    with pytest.raises(AllreduceMismatch, match="arithmetic in float16"):
        assert_allreduce_matches([wrong] * 4, RANDOM)


def test_float16_may_round_as_float16_does() -> None:
    parts = random_parts((50,), torch.float16, count=4, seed=0)
    assert_allreduce_matches({0: _sum(parts)}, parts)
    assert_allreduce_matches({0: _sum([part.float() for part in parts]).half()}, parts)


@pytest.mark.parametrize("wrong", [_sum(EXACT).double(), _sum(EXACT)[:3], torch.full((4, 5), torch.nan)])
def test_dtype_shape_and_nan(wrong) -> None:
    with pytest.raises(AllreduceMismatch, match=r"rank 0: (has dtype|has shape|element)"):
        assert_allreduce_matches({0: wrong}, EXACT)


def test_a_rank_without_a_result() -> None:
    with pytest.raises(AllreduceMismatch, match="3 results for 4 contributions") as caught:
        assert_allreduce_matches([_sum(EXACT)] * 3, EXACT)
    assert caught.value.ranks == (3,)


def test_contributions_that_changed_are_named() -> None:
    parts = [torch.tensor([1.0, float("nan")]), torch.tensor([2.0, 3.0]), torch.tensor([0.0, 4.0])]
    placed = [part.clone() for part in parts]
    assert_contributions_kept(placed, parts)
    placed[2][0] = -0.0
    with pytest.raises(AllreduceMismatch, match="reduce_add: the input of rank 2 has changed") as caught:
        assert_contributions_kept(placed, parts, what="reduce_add")
    assert caught.value.ranks == (2,)
