"""Planted faults of sums: special values, rounding, sizes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from mgpu_check.suite.collectives.faults.planting import Seen, around, spoiled, through
from mgpu_check.suite.common.faults.registry import fault
from mgpu_check.torch_hooks.tensors import as_bits

_IEEE, _ROUNDING, _BIAS, _SIZES = (
    "test_reductions_as_ieee_says", "test_rounding_of_reductions", "test_bias_of_rounding", "test_sizes",
)  # fmt: skip
_LOW_HALF = -(1 << 16)


@fault("NaN counts as zero in a sum", _IEEE, condition="float32, NaN")
def nan_is_zero() -> Iterator[None]:
    def reduce(seen: Seen) -> Any:
        if seen.op == "SUM" and seen.is_of(torch.float32):
            seen.first.masked_fill_(seen.first.isnan(), 0.0)
        return seen.call()

    with around(reduce, "all_reduce"):
        yield


@fault("infinities become the largest finite number", _IEEE, condition="float16, infinities")
def infinity_clamped() -> Iterator[None]:
    def spoil(seen: Seen) -> None:
        if seen.is_of(torch.float16):
            most = torch.finfo(torch.float16).max
            seen.first.masked_fill_(seen.first == torch.inf, most)

    with spoiled(spoil, "all_reduce"):
        yield


@fault("subnormals count as zero on the last rank", _IEEE, condition="float32, subnormals")
def subnormals_of_sums_flushed() -> Iterator[None]:
    def spoil(seen: Seen) -> None:
        if seen.last and seen.is_of(torch.float32):
            small = seen.first.abs() < torch.finfo(torch.float32).smallest_normal
            seen.first.masked_fill_(small & (seen.first != 0), 0.0)

    with spoiled(spoil, "all_reduce"):
        yield


@fault("a sum starts at +0, so it loses the sign of -0", _IEEE, condition="-0")
def sign_of_zero_lost() -> Iterator[None]:
    def spoil(seen: Seen) -> None:
        if seen.op == "SUM" and seen.first.dtype.is_floating_point:
            seen.first.add_(0.0)

    with spoiled(spoil, "all_reduce"):
        yield


@fault("infinity minus infinity is zero", _IEEE, condition="float64, infinities")
def infinities_cancel() -> Iterator[None]:
    def reduce(seen: Seen) -> Any:
        if seen.op != "SUM" or not seen.is_of(torch.float64):
            return seen.call()
        clean = ~seen.first.isnan()
        work = seen.finish()
        seen.first.masked_fill_(clean & seen.first.isnan(), 0.0)
        return work

    with around(reduce, "all_reduce"):
        yield


@fault(
    "the last rank adds up in another order, so its bits differ",
    _ROUNDING,
    condition="float32, sums that round, one rank",
)
def other_order_on_one_rank() -> Iterator[None]:
    def reduce(seen: Seen) -> Any:
        if seen.op != "SUM" or seen.size < 3 or seen.late or not seen.is_of(torch.float32) or seen.first.dim() != 1:
            return seen.call()
        parts = [torch.empty_like(seen.first) for _ in range(seen.size)]
        dist.all_gather(parts, seen.first.clone(), group=seen.group)
        work = seen.call()
        if seen.last:
            total = parts[-1].clone()
            for part in parts[1:-1]:
                total.add_(part)
            seen.first.copy_(total.add_(parts[0]))
        return work

    with around(reduce, "all_reduce"):
        yield


@fault("float64 is added up in float32", _ROUNDING, condition="float64, SUM")
def doubles_added_as_singles() -> Iterator[None]:
    with around(through(torch.float32, torch.float64, lambda single: single), "all_reduce", "reduce"):
        yield


@fault("sums of bfloat16 are cut off, not rounded", _BIAS, condition="bfloat16")
def truncated_bfloat16() -> Iterator[None]:
    def cut(total: torch.Tensor) -> torch.Tensor:
        return total.view(torch.int32).bitwise_and(_LOW_HALF).view(torch.float32).to(torch.bfloat16)

    with around(through(torch.float32, torch.bfloat16, cut), "all_reduce"):
        yield


@fault("sums of float32 are cut off, not rounded", _BIAS, condition="float32")
def truncated_float32() -> Iterator[None]:
    def cut(total: torch.Tensor) -> torch.Tensor:
        near = total.float()
        beyond = near.double().abs() > total.abs()
        bits = near.view(torch.int32)
        return torch.where(beyond, bits - 1, bits).view(torch.float32)

    with around(through(torch.float64, torch.float32, cut), "all_reduce"):
        yield


@fault("reduce rounds half precision away from zero", _BIAS, condition="float16, reduce")
def rounded_up() -> Iterator[None]:
    def cut(total: torch.Tensor) -> torch.Tensor:
        near = total.half()
        short = near.double().abs() < total.abs()
        bits = near.view(torch.int16)
        return torch.where(short, bits + 1, bits).view(torch.float16)

    with around(through(torch.float64, torch.float16, cut), "reduce"):
        yield


def _flip_last(tensor: torch.Tensor) -> None:
    """Invert the lowest bit of the last number of a contiguous tensor."""
    as_bits(tensor).view(-1)[-1:].bitwise_xor_(1)


@fault("all_reduce adds up only the first 4,096 elements", _SIZES, condition="above 4,096 elements")
def reduced_up_to_a_page() -> Iterator[None]:
    def reduce(seen: Seen) -> Any:
        if seen.first.numel() <= 4096 or seen.last:
            return seen.call()
        own = seen.first.clone()
        work = seen.finish()
        seen.first.reshape(-1)[4096:] = own.reshape(-1)[4096:]
        return work

    with around(reduce, "all_reduce"):
        yield


@fault("a bit is flipped in the tail of a long sum", _SIZES, condition="float16, above 64 Ki elements")
def tail_of_a_long_half_sum() -> Iterator[None]:
    def spoil(seen: Seen) -> None:
        if seen.first.numel() > 1 << 16 and seen.is_of(torch.float16):
            _flip_last(seen.first)

    with spoiled(spoil, "all_reduce"):
        yield


@fault(
    "a bit is flipped in the tail of a long sum of the last rank",
    _SIZES,
    condition="float32, above 1 Mi elements, one rank",
)
def tail_of_a_very_long_sum() -> Iterator[None]:
    def spoil(seen: Seen) -> None:
        if seen.last and seen.first.numel() > 1 << 20:
            _flip_last(seen.first)

    with spoiled(spoil, "all_reduce"):
        yield


@fault("reduce_scatter_tensor loses the end of long parts", _SIZES, condition="above 64 Ki elements")
def long_part_loses_its_end() -> Iterator[None]:
    def spoil(seen: Seen) -> None:
        if seen.first.numel() > 1 << 16:
            seen.first[1 << 16 :] = 0

    with spoiled(spoil, "reduce_scatter_tensor"):
        yield


@fault("the last of an odd number of elements is not reduced", _SIZES, condition="float16, odd sizes")
def odd_element_left() -> Iterator[None]:
    def reduce(seen: Seen) -> Any:
        if seen.first.numel() % 2 == 0 or not seen.is_of(torch.float16) or seen.rank:
            return seen.call()
        own = seen.first.clone()
        work = seen.finish()
        seen.first.reshape(-1)[-1] = own.reshape(-1)[-1]
        return work

    with around(reduce, "all_reduce"):
        yield


@fault("in a world of one rank a sum is doubled", "test_world_of_one", condition="world of 1")
def doubled_alone() -> Iterator[None]:
    def spoil(seen: Seen) -> None:
        if seen.op == "SUM" and seen.size == 1 and seen.group is None and seen.is_of(torch.float32, torch.int64):
            seen.first.mul_(2)

    with spoiled(spoil, "all_reduce"):
        yield
