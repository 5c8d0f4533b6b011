"""The model of collectives, its bounds, and the statistic of rounding; without ranks."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
import torch

from mgpu_check.errors import CollectiveMismatch
from mgpu_check.oracles.collectives.cases import FLOATING, OPERATIONS, REDUCED, CollectiveCall, assert_shared, left_out
from mgpu_check.oracles.collectives.repeated_calls import LIMIT, elements_for, mean_error, most_ranks, terms_of
from mgpu_check.suite.collectives import strategies as collective_calls
from mgpu_check.suite.collectives.calls import CallMemory, _may_refuse, given_blocks, right_block, shaped

FOLD: dict[str, Callable[..., torch.Tensor]] = {
    "SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
}


@pytest.mark.parametrize("count", [2, 3, 4, 7, 8, 16])
@pytest.mark.parametrize("values", ["borders", "special"])
def test_every_order_gives_what_the_model_gives(values, count):
    """The model's only right result is right in the orders of a ring, of a tree and at random."""
    orders = [list(range(count)), list(reversed(range(count))), random.Random(count).sample(range(count), count)]
    for dtype, op in itertools.product(FLOATING, FOLD):
        kind = getattr(torch, dtype)
        parts = given_blocks(values, op, kind, count, 5)
        right = right_block(values, op, kind, count, 5)
        assert right.tolerance is None
        for order in orders:
            line = parts[order[0]]
            for place in order[1:]:
                line = FOLD[op](line, parts[place])
            tree = [parts[place] for place in order]
            while len(tree) > 1:
                pairs = [FOLD[op](a, b) for a, b in zip(tree[::2], tree[1::2], strict=False)]
                tree = pairs + tree[len(pairs) * 2 :]
            for got in (line, tree[0]):
                wrong = right.wrong(got, slice(None))
                assert not wrong.any(), (dtype, op, got[wrong][:3], right.value[wrong][:3])


@pytest.mark.parametrize("op", ["SUM", "AVG", "PRODUCT"])
@pytest.mark.parametrize("dtype", FLOATING)
def test_no_right_program_exceeds_the_bound_and_it_is_no_hundred_times_too_wide(dtype, op):
    kind = getattr(torch, dtype)
    worst = 0.0
    for count in (3, 5, 8):
        parts = given_blocks("random", op, kind, count, 11)
        right = right_block("random", op, kind, count, 11)
        for seed in range(8):
            order = random.Random(seed).sample(range(count), count)
            total = parts[order[0]]
            for place in order[1:]:
                total = total * parts[place] if op == "PRODUCT" else total + parts[place]
            got = total / count if op == "AVG" else total
            assert not right.wrong(got, slice(None)).any()
            used = ((got.double() - right.exact).abs() / right.tolerance).nan_to_num(0.0, posinf=0.0)
            worst = max(worst, float(used.max()))
    assert worst > 0.01


def test_extremes_tell_right_operations_from_near_ones():
    """Signed for unsigned, a wrap, a saturated sum, a rank left out: each shows in the block itself, for every
    seed."""
    count = 4
    for seed in range(20):
        bytes_, signed = (given_blocks("borders", "MAX", kind, count, seed) for kind in (torch.uint8, torch.int8))
        largest = torch.stack(bytes_).view(torch.int8).amax(0).view(torch.uint8)
        assert right_block("borders", "MAX", torch.uint8, count, seed).wrong(largest, slice(None)).any()
        least = -torch.stack([-part for part in signed]).amax(0)
        assert right_block("borders", "MIN", torch.int8, count, seed).wrong(least, slice(None)).any()
        factors = given_blocks("borders", "PRODUCT", torch.float64, count, seed)
        short = factors[0] * factors[1] * factors[2]
        assert right_block("borders", "PRODUCT", torch.float64, count, seed).wrong(short, slice(None)).any()


def test_unused_combinations_have_reasons_and_all_others_are_called():
    called = {(call.place, call.dtype, call.op) for call in collective_calls.all_reduces(1)}
    for place, dtype, op in itertools.product(("device", "cpu"), REDUCED, OPERATIONS):
        call = CollectiveCall("all_reduce", dtype, op=op, values="borders", place=place)
        assert ((place, dtype, op) in called) == (not left_out(call))


@pytest.mark.parametrize("layout", ["dense", "matrix", "transposed", "channels_last", "gaps"])
def test_every_byte_of_the_memory_is_told(layout):
    memory = CallMemory(torch.float32)
    numbers = [memory.add(shaped(layout, 24)) for _ in range(2)]
    content = torch.arange(24.0)
    whole = memory.filled([content, None])
    assert memory.view(whole, numbers[0]).reshape(-1).tolist() == content.tolist()
    mine = {id_ for number in numbers for id_ in memory.view(torch.arange(len(whole)), number).reshape(-1).tolist()}
    assert len(mine) == 48
    assert len(whole) >= 48 + 3 * 17


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("count", [2, 4, 8])
def test_rounding_to_nearest_leans_to_no_side_and_truncation_does(count, dtype):
    kind = getattr(torch, dtype)
    for seed in range(3):
        terms = terms_of(count, kind, seed)
        assert len(terms[0]) == elements_for(count)
        order = random.Random(seed).sample(range(count), count)
        total = terms[order[0]]
        for place in order[1:]:
            total = total + terms[place]
        assert abs(mean_error(total, terms)) < LIMIT / 2
        whole = torch.stack([term.double() for term in terms])
        large = whole.gather(0, whole.abs().argmax(0)[None])[0]
        # Cut off once, of the exact sum: the least that truncation can do.
        cut = large + torch.trunc(whole.sum(0) - large) if kind is not torch.float64 else large + torch.trunc(
            whole.scatter(0, whole.abs().argmax(0)[None], 0.0).sum(0)
        )  # fmt: skip
        assert mean_error(cut, terms) < -LIMIT


def test_too_many_ranks_for_a_dtype_are_refused():
    with pytest.raises(ValueError, match="use fewer ranks"):
        terms_of(64, torch.bfloat16, 0)
    assert most_ranks(torch.bfloat16) == 63


def test_ranks_that_differ_are_named():
    with pytest.raises(CollectiveMismatch, match="rank 2") as caught:
        assert_shared([[("x", "a")], [("x", "a")], [("x", "b")]])
    assert caught.value.ranks == (2,)
    with pytest.raises(CollectiveMismatch, match="rank 1 against rank 0") as tied:
        assert_shared([[("x", "a")], [("x", "b")]])
    assert tied.value.ranks == (0, 1), "either may be wrong"
    assert_shared([[("x", "a")], [("x", "a")]])


@pytest.mark.parametrize(
    ("function", "place", "layout", "words", "may"),
    [
        ("all_to_all", "cpu", "dense", "Backend gloo does not support alltoall", True),
        ("all_to_all", "device", "dense", "Backend nccl does not support alltoall", False),
        ("all_to_all", "cpu", "dense", "Tensors must be contiguous", False),
        ("all_reduce", "cpu", "dense", "Backend gloo does not support allreduce", False),
        ("all_reduce", "device", "gaps", "Tensors must be contiguous", True),
        ("all_reduce", "device", "dense", "Tensors must be contiguous", False),
    ],
)
def test_a_backend_may_refuse_gaps_and_older_gloo_lists_for_all_to_all(function, place, layout, words, may):
    assert _may_refuse(CollectiveCall(function, "float32", place=place, layout=layout), words) is may
