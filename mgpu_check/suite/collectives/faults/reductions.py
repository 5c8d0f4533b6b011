"""Planted faults of reductions: dtypes, operations, special values, rounding, sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from mgpu_check.suite.collectives.faults.conditions import LAST, NAN, above, dtype, op
from mgpu_check.suite.collectives.faults.planting import Seen, after, before, flipped, instead, unchanged
from mgpu_check.suite.common.faults.breaking import around
from mgpu_check.suite.common.faults.registry import FaultRow, fault, register
from mgpu_check.suite.common.faults.when import When

_ALL, _OTHERS, _IEEE, _ROUNDING, _BIAS, _SIZES, _ASYNC, _PROGRAMS = (
    "test_all_reduce_of_every_dtype", "test_reductions_of_every_dtype", "test_reductions_as_ieee_says",
    "test_rounding_of_reductions", "test_bias_of_rounding", "test_sizes", "test_asynchronous_collectives",
    "test_programs_of_collectives",
)  # fmt: skip
_SUM = op("SUM")
_INFINITIES = When("infinities", lambda seen: bool(seen.first.isinf().any()))
_FLOATS = When("-0", lambda seen: seen.op == "SUM" and seen.first.dtype.is_floating_point)
_SECOND = When("one rank", lambda seen: seen.rank == 1)
_FIRST = When("one rank", lambda seen: seen.rank == 0)
_NOT_LAST = When("all ranks but the last", lambda seen: not LAST.holds(seen))


def _subnormal(numbers: torch.Tensor) -> torch.Tensor:
    return (numbers.abs() < torch.finfo(numbers.dtype).smallest_normal) & (numbers != 0)


def _bfloat16_towards_zero(total: torch.Tensor) -> torch.Tensor:
    return total.view(torch.int32).bitwise_and(-(1 << 16)).view(torch.float32)


def _float32_towards_zero(total: torch.Tensor) -> torch.Tensor:
    near = total.float()
    bits = near.view(torch.int32)
    return torch.where(near.double().abs() > total.abs(), bits - 1, bits).view(torch.float32)


def _float16_away_from_zero(total: torch.Tensor) -> torch.Tensor:
    near = total.half()
    bits = near.view(torch.int16)
    return torch.where(near.double().abs() < total.abs(), bits + 1, bits).view(torch.float16)


register(
    __name__,
    FaultRow("unsigned-maximum-as-signed", "MAX treats unsigned numbers as signed", _ALL, instead("all_reduce"),
        lambda seen: seen.finish(seen.first.view(torch.int8)), dtype("uint8") & op("MAX")),
    FaultRow("product-without-the-last-rank", "PRODUCT leaves out the factor of the last rank", _ALL,
        before("all_reduce"), lambda seen: LAST.holds(seen) and seen.first.fill_(1), dtype("float64") & op("PRODUCT")),
    FaultRow("long-sum-in-doubles", "a sum of integers is computed in floating point", _ALL, instead("all_reduce"),
        lambda seen: seen.through(torch.float64), dtype("int64") & _SUM),
    FaultRow("sum-saturates", "a sum of integers saturates", _ALL, instead("all_reduce"),
        lambda seen: seen.through(torch.int64, lambda total: total.clamp(-(1 << 31), (1 << 31) - 1)),
        dtype("int32") & _SUM),
    FaultRow("half-product-of-few-bits", "a product has the precision of bfloat16 on the second rank", _ALL,
        after("all_reduce"), lambda seen: seen.first.copy_(seen.first.bfloat16()),
        dtype("float16") & op("PRODUCT") & _SECOND),
    FaultRow("mean-of-one-rank-more", "the mean of float16 divides by one more rank", _ALL, after("all_reduce"),
        lambda seen: seen.size > 1 and seen.first.mul_(seen.size / (seen.size + 1)), dtype("float16") & op("AVG")),
    FaultRow("factor-forgotten", "PREMUL_SUM forgets its factor", _ALL, instead("all_reduce"),
        lambda seen: seen.with_op("SUM"), dtype("float64") & op("PREMUL_SUM")),
    FaultRow("and-is-or", "BAND of bytes is BOR", _ALL, instead("all_reduce"),
        lambda seen: seen.with_op("BOR"), dtype("uint8") & op("BAND")),
    FaultRow("xor-of-half-a-number", "BXOR uses the lower half of a number only", _ALL, after("all_reduce"),
        lambda seen: seen.first.bitwise_and_(0xFFFFFFFF), dtype("int64") & op("BXOR")),
    FaultRow("all-is-any", "a product of booleans is their sum", _ALL, instead("all_reduce"),
        lambda seen: seen.with_op("MAX"), dtype("bool") & op("PRODUCT")),
    FaultRow("imaginary-parts-lost", "imaginary parts are not added on the last rank", _ALL, after("all_reduce"),
        lambda seen: torch.view_as_real(seen.first)[..., 1].zero_(), dtype("complex128") & LAST),
    FaultRow("reduce-confuses-extremes", "reduce returns the maximum for the minimum", _OTHERS, instead("reduce"),
        lambda seen: seen.with_op("MAX"), dtype("int32") & op("MIN")),
    FaultRow("operation-lost-by-the-older-name", "reduce_scatter_tensor, the older name, always adds up", _OTHERS,
        around(dist, "reduce_scatter_tensor"),
        lambda real, output, given, op=None, **options: real(output, given, **options)),
    FaultRow("scattered-maximum-of-one-element",
        "reduce_scatter_tensor gives the last rank the minimum of its first element", _OTHERS,
        after("reduce_scatter_tensor"), lambda seen: seen.first[:1].abs_().add_(1).neg_(),
        dtype("bfloat16") & op("MAX") & LAST),
    FaultRow("root-left-out", "reduce leaves out the root if it is not rank 0", _OTHERS, before("reduce"),
        lambda seen: seen.root == seen.rank != 0 and seen.first.zero_(), dtype("float32") & _SUM),
    FaultRow("result-for-rank-zero", "reduce sends its result to rank 0 instead of the root", (_OTHERS, "test_groups"),
        instead("reduce"), lambda seen: seen.with_root(group_dst=0)),
    FaultRow("parts-in-the-wrong-order", "reduce_scatter of a list gives parts in the wrong order", _SIZES,
        instead("reduce_scatter"), lambda seen: seen.call(seen.args[0], seen.args[1][::-1])),
    FaultRow("fourth-rank-left-out", "a sum leaves out the fourth rank", (_ASYNC, _PROGRAMS), before("all_reduce"),
        lambda seen: seen.op == "SUM" and dist.get_rank(seen.group) == 3 and seen.first.zero_(),
        When("groups of 4 and more", lambda seen: seen.size > 3)),
    FaultRow("nan-is-zero", "NaN counts as zero in a sum", _IEEE, before("all_reduce"),
        lambda seen: seen.op == "SUM" and seen.first.masked_fill_(seen.first.isnan(), 0.0), dtype("float32") & NAN),
    FaultRow("infinity-clamped", "infinities become the largest finite number", _IEEE, after("all_reduce"),
        lambda seen: seen.first.clamp_(max=torch.finfo(torch.float16).max), dtype("float16") & _INFINITIES),
    FaultRow("subnormals-of-sums-flushed", "subnormals count as zero on the last rank", _IEEE, after("all_reduce"),
        lambda seen: LAST.holds(seen) and seen.first.masked_fill_(_subnormal(seen.first), 0.0),
        dtype("float32") & When("subnormals", lambda seen: bool(_subnormal(seen.first).any()))),
    FaultRow("sign-of-zero-lost", "a sum starts at +0, so it loses the sign of -0", _IEEE, after("all_reduce"),
        lambda seen: seen.first.add_(0.0), _FLOATS),
    FaultRow("doubles-added-as-singles", "float64 is added up in float32", _ROUNDING, instead("all_reduce", "reduce"),
        lambda seen: seen.through(torch.float32), dtype("float64") & _SUM),
    FaultRow("truncated-bfloat16", "sums of bfloat16 are cut off, not rounded", _BIAS, instead("all_reduce"),
        lambda seen: seen.through(torch.float32, _bfloat16_towards_zero), dtype("bfloat16") & _SUM),
    FaultRow("truncated-float32", "sums of float32 are cut off, not rounded", _BIAS, instead("all_reduce"),
        lambda seen: seen.through(torch.float64, _float32_towards_zero), dtype("float32") & _SUM),
    FaultRow("rounded-up", "reduce rounds half precision away from zero", _BIAS, instead("reduce"),
        lambda seen: seen.through(torch.float64, _float16_away_from_zero), dtype("float16") & _SUM),
    FaultRow("reduced-up-to-a-page", "all_reduce adds up only the first 4,096 elements", _SIZES,
        unchanged("all_reduce"), lambda seen: seen.first.reshape(-1)[4096:], above(4096) & _NOT_LAST),
    FaultRow("tail-of-a-long-half-sum", "a bit is flipped in the tail of a long sum", _SIZES, after("all_reduce"),
        lambda seen: flipped(seen.first, at=-1), dtype("float16") & above(1 << 16)),
    FaultRow("tail-of-a-very-long-sum", "a bit is flipped in the tail of a long sum of the last rank", _SIZES,
        after("all_reduce"), lambda seen: flipped(seen.first, at=-1), above(1 << 20) & LAST),
    FaultRow("long-part-loses-its-end", "reduce_scatter_tensor loses the end of long parts", _SIZES,
        after("reduce_scatter_tensor"), lambda seen: seen.first[1 << 16 :].zero_(), above(1 << 16)),
    FaultRow("odd-element-left", "the last of an odd number of elements is not reduced", _SIZES,
        unchanged("all_reduce"), lambda seen: seen.first.reshape(-1)[-1:],
        dtype("float16") & When("odd sizes", lambda seen: seen.first.numel() % 2 == 1) & _FIRST),
    FaultRow("doubled-alone", "in a world of one rank a sum is doubled", "test_world_of_one", after("all_reduce"),
        lambda seen: seen.op == "SUM" and seen.first.dtype in (torch.float32, torch.int64) and seen.first.mul_(2),
        When("world of 1", lambda seen: seen.size == 1 and seen.group is None)),
)  # fmt: skip


@fault("MIN is computed as -MAX(-x), which overflows", _ALL, by=instead("all_reduce"), when=dtype("int8") & op("MIN"))
def minimum_by_negation(seen: Seen) -> Any:
    negative = -seen.first
    work = seen.with_op("MAX", negative)
    seen.first.copy_(-negative)
    return work


@fault("reduce_scatter_tensor swaps the parts of the last two ranks", _OTHERS, by=instead("reduce_scatter_tensor"),
       when=When("groups of 5 and more", lambda seen: seen.size > 4), least_gpus=5)  # fmt: skip
def parts_of_the_last_swapped(seen: Seen) -> Any:
    *others, last_but_one, last = seen.args[1].chunk(seen.size)
    return seen.call(seen.args[0], torch.cat([*others, last, last_but_one]))


@fault("a second sum of the same tensor returns the first result", _PROGRAMS, by=after("all_reduce"),
       when="from the second call with one tensor object on, below 4,096 elements")  # fmt: skip
def sum_of_a_tensor_kept(seen: Seen) -> None:
    """As with a cache whose key is the tensor and not its content."""
    if 0 < seen.first.numel() < 1 << 12:
        _, result = seen.kept.setdefault(id(seen.first), (seen.first, seen.first.clone()))
        seen.first.copy_(result)


@fault("infinity minus infinity is zero", _IEEE, by=instead("all_reduce"),
       when=replace(dtype("float64") & _SUM, text="float64, infinities"))  # fmt: skip
def infinities_cancel(seen: Seen) -> Any:
    clean = ~seen.first.isnan()
    work = seen.finish()
    seen.first.masked_fill_(clean & seen.first.isnan(), 0.0)
    return work


@fault("the last rank adds up in another order, so its bits differ", _ROUNDING, by=instead("all_reduce"),
       when=replace(dtype("float32") & _SUM, text="float32, sums that round, one rank"))  # fmt: skip
def other_order_on_one_rank(seen: Seen) -> Any:
    if seen.size < 3 or seen.late or seen.first.dim() != 1:
        return NotImplemented
    parts = [torch.empty_like(seen.first) for _ in range(seen.size)]
    dist.all_gather(parts, seen.first.clone(), group=seen.group)
    work = seen.call()
    if LAST.holds(seen):
        total = parts[-1].clone()
        for part in (*parts[1:-1], parts[0]):
            total.add_(part)
        seen.first.copy_(total)
    return work
