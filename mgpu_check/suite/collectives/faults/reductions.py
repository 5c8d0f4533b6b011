"""Planted faults of reductions in one dtype or with one operation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from mgpu_check.suite.collectives.faults.planting import Seen, around, spoiled, through
from mgpu_check.suite.common.faults.registry import fault

_ALL = "test_all_reduce_of_every_dtype"
_OTHERS = "test_reductions_of_every_dtype"


def _as(op: str, seen: Seen, tensor: torch.Tensor) -> Any:
    """Call an in-place reduction with another operation, and wait for it."""
    rest = [value for value in seen.args[1:] if not isinstance(value, (dist.ReduceOp, dist.ReduceOp.RedOpType))]
    work = seen.real(tensor, *rest, **{**seen.kwargs, "op": getattr(dist.ReduceOp, op)})
    if isinstance(work, dist.Work):
        work.wait()
    return work


def _taken_for(other: str, op: str, dtype: torch.dtype) -> Callable[[Seen], Any]:
    """Return an in-place reduction that uses a wrong operation for one operation and dtype."""

    def reduce(seen: Seen) -> Any:
        return _as(other, seen, seen.first) if seen.op == op and seen.is_of(dtype) else seen.call()

    return reduce


@fault("MAX treats unsigned numbers as signed", _ALL, condition="uint8, MAX")
def unsigned_maximum_as_signed() -> Iterator[None]:
    def reduce(seen: Seen) -> Any:
        if seen.op == "MAX" and seen.is_of(torch.uint8):
            return seen.finish(seen.first.view(torch.int8))
        return seen.call()

    with around(reduce, "all_reduce"):
        yield


@fault("MIN is computed as -MAX(-x), which overflows", _ALL, condition="int8, MIN")
def minimum_by_negation() -> Iterator[None]:
    def reduce(seen: Seen) -> Any:
        if seen.op != "MIN" or not seen.is_of(torch.int8):
            return seen.call()
        negative = -seen.first
        work = _as("MAX", seen, negative)
        seen.first.copy_(-negative)
        return work

    with around(reduce, "all_reduce"):
        yield


@fault("PRODUCT leaves out the factor of the last rank", _ALL, condition="float64, PRODUCT")
def product_without_the_last_rank() -> Iterator[None]:
    def reduce(seen: Seen) -> Any:
        if seen.op == "PRODUCT" and seen.last and seen.is_of(torch.float64):
            seen.first.fill_(1)
        return seen.call()

    with around(reduce, "all_reduce"):
        yield


@fault("a sum of integers is computed in floating point", _ALL, condition="int64, SUM")
def long_sum_in_doubles() -> Iterator[None]:
    with around(through(torch.float64, torch.int64, lambda total: total.to(torch.int64)), "all_reduce"):
        yield


@fault("a sum of integers saturates", _ALL, condition="int32, SUM")
def sum_saturates() -> Iterator[None]:
    limits = torch.iinfo(torch.int32)
    back = through(torch.int64, torch.int32, lambda total: total.clamp(limits.min, limits.max).to(torch.int32))
    with around(back, "all_reduce"):
        yield


@fault("a product has the precision of bfloat16 on the second rank", _ALL, condition="float16, PRODUCT, one rank")
def half_product_of_few_bits() -> Iterator[None]:
    def spoil(seen: Seen) -> None:
        if seen.op == "PRODUCT" and seen.rank == 1 and seen.is_of(torch.float16):
            seen.first.copy_(seen.first.bfloat16())

    with spoiled(spoil, "all_reduce"):
        yield


@fault("the mean of float16 divides by one more rank", _ALL, condition="float16, AVG")
def mean_of_one_rank_more() -> Iterator[None]:
    def spoil(seen: Seen) -> None:
        if seen.op == "AVG" and seen.size > 1 and seen.is_of(torch.float16):
            seen.first.mul_(seen.size / (seen.size + 1))

    with spoiled(spoil, "all_reduce"):
        yield


@fault("PREMUL_SUM forgets its factor", _ALL, condition="float64, PREMUL_SUM")
def factor_forgotten() -> Iterator[None]:
    with around(_taken_for("SUM", "PREMUL_SUM", torch.float64), "all_reduce"):
        yield


@fault("BAND of bytes is BOR", _ALL, condition="uint8, BAND")
def and_is_or() -> Iterator[None]:
    with around(_taken_for("BOR", "BAND", torch.uint8), "all_reduce"):
        yield


@fault("BXOR uses the lower half of a number only", _ALL, condition="int64, BXOR")
def xor_of_half_a_number() -> Iterator[None]:
    def spoil(seen: Seen) -> None:
        if seen.op == "BXOR" and seen.is_of(torch.int64):
            seen.first.bitwise_and_(0xFFFFFFFF)

    with spoiled(spoil, "all_reduce"):
        yield


@fault("a product of booleans is their sum", _ALL, condition="bool, PRODUCT")
def all_is_any() -> Iterator[None]:
    with around(_taken_for("MAX", "PRODUCT", torch.bool), "all_reduce"):
        yield


@fault("imaginary parts are not added on the last rank", _ALL, condition="complex128, one rank")
def imaginary_parts_lost() -> Iterator[None]:
    def spoil(seen: Seen) -> None:
        if seen.last and seen.is_of(torch.complex128):
            torch.view_as_real(seen.first)[..., 1] = 0

    with spoiled(spoil, "all_reduce"):
        yield


@fault("reduce returns the maximum for the minimum", _OTHERS, condition="int32, MIN")
def reduce_confuses_extremes() -> Iterator[None]:
    with around(_taken_for("MAX", "MIN", torch.int32), "reduce"):
        yield


@fault(
    "reduce_scatter_tensor gives the last rank the minimum of its first element",
    _OTHERS,
    condition="bfloat16, MAX, one rank",
)
def scattered_maximum_of_one_element() -> Iterator[None]:
    def spoil(seen: Seen) -> None:
        if seen.op == "MAX" and seen.last and seen.first.numel() and seen.is_of(torch.bfloat16):
            seen.first[0] = -seen.first[0].abs() - 1

    with spoiled(spoil, "reduce_scatter_tensor"):
        yield


@fault("reduce leaves out the root if it is not rank 0", _OTHERS, condition="float32")
def root_left_out() -> Iterator[None]:
    def reduce(seen: Seen) -> Any:
        root = seen.kwargs.get("dst", seen.kwargs.get("group_dst"))
        if root == seen.rank != 0 and seen.op == "SUM" and seen.is_of(torch.float32):
            seen.first.zero_()
        return seen.call()

    with around(reduce, "reduce"):
        yield


@fault("reduce sends its result to rank 0 instead of the root", _OTHERS, "test_groups")
def result_for_rank_zero() -> Iterator[None]:
    def reduce(seen: Seen) -> Any:
        named = {key: value for key, value in seen.kwargs.items() if key not in ("dst", "group_dst")}
        return seen.real(*seen.args, **named, group_dst=0)

    with around(reduce, "reduce"):
        yield


@fault("reduce_scatter of a list gives parts in the wrong order", "test_sizes")
def parts_in_the_wrong_order() -> Iterator[None]:
    def reduce(seen: Seen) -> Any:
        return seen.call(seen.args[0], list(reversed(seen.args[1])))

    with around(reduce, "reduce_scatter"):
        yield


@fault(
    "reduce_scatter_tensor swaps the parts of the last two ranks",
    "test_reductions_of_every_dtype",
    condition="groups of 5 and more",
    least_gpus=5,
)
def parts_of_the_last_swapped() -> Iterator[None]:
    def reduce(seen: Seen) -> Any:
        if seen.size < 5:
            return seen.call()
        *others, last_but_one, last = seen.args[1].chunk(seen.size)
        return seen.call(seen.args[0], torch.cat([*others, last, last_but_one]))

    with around(reduce, "reduce_scatter_tensor"):
        yield


@fault(
    "a sum leaves out the fourth rank",
    "test_asynchronous_collectives",
    "test_programs_of_collectives",
    condition="groups of 4 and more",
)
def fourth_rank_left_out() -> Iterator[None]:
    def reduce(seen: Seen) -> Any:
        if seen.op == "SUM" and seen.size >= 4 and dist.get_rank(seen.group) == 3:
            seen.first.zero_()
        return seen.call()

    with around(reduce, "all_reduce"):
        yield


@fault(
    "a second sum of the same tensor returns the first result",
    "test_programs_of_collectives",
    condition="from the second call with one tensor object on, below 4,096 elements",
)
def sum_of_a_tensor_kept() -> Iterator[None]:
    """As with a cache whose key is the tensor and not its content."""
    kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def spoil(seen: Seen) -> None:
        tensor = seen.first
        if not 0 < tensor.numel() < 1 << 12:
            return
        if id(tensor) in kept:
            tensor.copy_(kept[id(tensor)][1])
        else:
            kept[id(tensor)] = tensor, tensor.clone()

    with spoiled(spoil, "all_reduce"):
        yield
