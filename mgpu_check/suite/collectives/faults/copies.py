"""Planted faults of collectives that copy: dtypes, sizes, layouts, asynchronous calls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from mgpu_check.suite.collectives.faults.planting import Seen, around, spoiled
from mgpu_check.suite.common.faults.conditions import Count
from mgpu_check.suite.common.faults.registry import fault

_COPIES, _SIZES, _LAYOUTS, _ASYNC = (
    "test_copies_of_every_dtype", "test_sizes", "test_layouts", "test_asynchronous_collectives",
)  # fmt: skip
_OUT_OF_PLACE = (
    "all_gather",
    "all_gather_into_tensor",
    "scatter",
    "reduce_scatter_tensor",
    "all_to_all",
    "all_to_all_single",
)


@fault("broadcast replaces every NaN by the same NaN", _COPIES, condition="float16, NaN")
def payload_of_nan_lost() -> Iterator[None]:
    def spoil(seen: Seen) -> None:
        if seen.is_of(torch.float16):
            seen.first.masked_fill_(seen.first.isnan(), torch.nan)

    with spoiled(spoil, "broadcast"):
        yield


@fault("integers go through float64", _COPIES, condition="int64, all_gather_into_tensor")
def integers_through_floats() -> Iterator[None]:
    def spoil(seen: Seen) -> None:
        if seen.is_of(torch.int64):
            seen.first.copy_(seen.first.double().clamp(-(2.0**62), 2.0**62))

    with spoiled(spoil, "all_gather_into_tensor"):
        yield


@fault("all_gather swaps the tensors of the last two ranks", _COPIES, condition="3 ranks and more")
def last_two_swapped() -> Iterator[None]:
    def gather(seen: Seen) -> Any:
        if len(seen.written) < 3:
            return seen.call()
        return seen.call([*seen.written[:-2], seen.written[-1], seen.written[-2]])

    with around(gather, "all_gather"):
        yield


@fault("gather leaves out the tensor of the last rank", _COPIES, condition="uint8")
def gather_misses_the_last() -> Iterator[None]:
    def spoil(seen: Seen) -> None:
        if len(seen.written) > 1 and seen.is_of(torch.uint8):
            seen.written[-1].zero_()

    with spoiled(spoil, "gather"):
        yield


@fault("scatter swaps the halves of numbers", _COPIES, condition="float64, one rank")
def halves_of_numbers_swapped() -> Iterator[None]:
    def spoil(seen: Seen) -> None:
        if seen.last and seen.is_of(torch.float64):
            halves = seen.first.view(torch.int32)
            halves.copy_(halves.view(-1, 2).flip(1).reshape(halves.shape).clone())

    with spoiled(spoil, "scatter"):
        yield


@fault("all_to_all gives each rank the data for the next rank", _COPIES, "test_groups")
def exchange_off_by_one() -> Iterator[None]:
    def exchange(seen: Seen) -> Any:
        given = list(seen.args[1])
        if len({tensor.numel() for tensor in given}) > 1:
            return seen.call()
        return seen.call(seen.args[0], given[1:] + given[:1])

    with around(exchange, "all_to_all"):
        yield


@fault("all_to_all_single conjugates complex numbers", _COPIES, condition="complex64")
def conjugated() -> Iterator[None]:
    def spoil(seen: Seen) -> None:
        if seen.is_of(torch.complex64):
            torch.view_as_real(seen.first)[..., 1].neg_()

    with spoiled(spoil, "all_to_all_single"):
        yield


@fault("a long broadcast loses its end on the last rank", _SIZES, condition="above 64 Ki elements, one rank")
def long_broadcast_cut() -> Iterator[None]:
    def spoil(seen: Seen) -> None:
        if seen.last and seen.first.numel() > 1 << 16:
            seen.first.reshape(-1)[1 << 16 :].zero_()

    with spoiled(spoil, "broadcast"):
        yield


@fault("a long all_gather_into_tensor repeats its first element", _SIZES, condition="above 1 MiB")
def long_gather_wraps() -> Iterator[None]:
    def spoil(seen: Seen) -> None:
        if seen.first.numel() * seen.first.element_size() > 1 << 20:
            seen.first.view(-1)[-3:] = seen.first.view(-1)[:3].clone()

    with spoiled(spoil, "all_gather_into_tensor"):
        yield


@fault("all_to_all_single shifts long parts by an element", _SIZES, condition="above 4,096 elements")
def long_exchange_shifted() -> Iterator[None]:
    def spoil(seen: Seen) -> None:
        if seen.first.numel() > 4096:
            seen.first.copy_(seen.first.roll(1))

    with spoiled(spoil, "all_to_all_single"):
        yield


@fault("gather repeats a page of long tensors", _SIZES, condition="above 4,096 elements")
def gathered_page_repeated() -> Iterator[None]:
    def spoil(seen: Seen) -> None:
        for tensor in seen.written:
            if tensor.numel() > 4096:
                tensor[4096:] = tensor[: tensor.numel() - 4096][:1]

    with spoiled(spoil, "gather"):
        yield


def _storage(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)


@fault("all_gather writes an element behind the last tensor of the list", _LAYOUTS, condition="one rank")
def written_behind() -> Iterator[None]:
    def spoil(seen: Seen) -> None:
        whole, end = _storage(seen.written[-1]), seen.written[-1].storage_offset() + seen.written[-1].numel()
        if seen.last and whole.numel() > end:
            whole[end : end + 1].view(-1).zero_()

    with spoiled(spoil, "all_gather"):
        yield


@fault(
    "broadcast clears the element before a tensor",
    _LAYOUTS,
    _COPIES,
    condition="tensors with an offset in their storage",
)
def written_before() -> Iterator[None]:
    def spoil(seen: Seen) -> None:
        begins = seen.first.storage_offset()
        if seen.first.numel() and begins:
            _storage(seen.first)[begins - 1 : begins].zero_()

    with spoiled(spoil, "broadcast"):
        yield


@fault("uneven splits are taken in the wrong order", _LAYOUTS, condition="uneven splits")
def splits_reversed() -> Iterator[None]:
    def spoil(seen: Seen) -> None:
        splits = seen.args[2] if len(seen.args) > 2 else None
        if splits and len(splits) > 1:
            parts = seen.first.split(list(splits))
            seen.first.copy_(torch.cat([*parts[1:], parts[0]]))

    with spoiled(spoil, "all_to_all_single"):
        yield


@fault("all_gather_into_tensor in place loses the rank's own part", _LAYOUTS, condition="in place")
def own_part_lost_in_place() -> Iterator[None]:
    def spoil(seen: Seen) -> None:
        output, given = seen.args[0], seen.args[1]
        if (
            output.untyped_storage().data_ptr() == given.untyped_storage().data_ptr()
            and given.storage_offset() > output.storage_offset()
        ):
            inside = given.storage_offset() + given.numel() <= output.storage_offset() + output.numel()
            if inside:
                given.zero_()

    with spoiled(spoil, "all_gather_into_tensor"):
        yield


@fault("broadcast of a channels_last tensor fills a copy and drops it", _LAYOUTS, condition="channels_last")
def broadcast_copy_dropped() -> Iterator[None]:
    def broadcast(seen: Seen) -> Any:
        tensor = seen.first
        return seen.call(tensor if tensor.is_contiguous() else tensor.contiguous())

    with around(broadcast, "broadcast", "all_reduce"):
        yield


@fault("all_reduce of a view with gaps reduces a copy and drops it", _LAYOUTS, condition="views with gaps")
def reduced_gaps_dropped() -> Iterator[None]:
    def reduce(seen: Seen) -> Any:
        tensor = seen.first
        gaps = tensor.dim() == 1 and not tensor.is_contiguous()
        return seen.call(tensor.contiguous() if gaps else tensor)

    with around(reduce, "all_reduce"):
        yield


@fault("an asynchronous all_reduce counts rank 0 twice", _ASYNC, condition="async")
def counted_twice_when_late() -> Iterator[None]:
    def reduce(seen: Seen) -> Any:
        if seen.late and seen.rank == 0 and seen.op in ("SUM", "PRODUCT"):
            seen.first.add_(seen.first)
        return seen.call()

    with around(reduce, "all_reduce"):
        yield


@fault(
    "an asynchronous all_reduce adds up only the first 4,096 elements", _ASYNC, condition="async, above 4,096 elements"
)
def late_up_to_a_page() -> Iterator[None]:
    def reduce(seen: Seen) -> Any:
        rest = seen.first.view(-1)[4096:] if seen.late and seen.size > 1 else None
        own = None if rest is None else rest.clone()
        work = seen.finish() if own is not None else seen.call()
        if rest is not None and own is not None:
            rest.copy_(own)
        return work

    with around(reduce, "all_reduce"):
        yield


@fault(
    "imaginary parts are lost on the way",
    "test_copies_of_every_dtype",
    condition="complex tensors on the CPU, two ranks and more",
)
def imaginary_parts_lost_on_the_way() -> Iterator[None]:
    def spoil(seen: Seen) -> None:
        for tensor in seen.written if seen.size > 1 else ():
            if tensor.is_complex() and tensor.device.type == "cpu":
                tensor.imag.zero_()

    with spoiled(spoil, "broadcast", "all_gather", "scatter"):
        yield


class _Hasty(dist.Work):
    """Work whose ``wait`` returns at once."""

    def __init__(self, real: dist.Work) -> None:
        super().__init__()
        self._real = real

    def wait(self, timeout: Any = None) -> bool:
        return True


@fault("waiting for an asynchronous scatter does not wait", _ASYNC, condition="async, device tensors")
def not_waited_for() -> Iterator[None]:
    kept: list[Any] = []

    def scatter(seen: Seen) -> Any:
        work = seen.call()
        if not isinstance(work, dist.Work) or seen.first.device.type == "cpu":
            return work
        kept.append(work)
        return _Hasty(work)

    with around(scatter, "scatter"):
        yield


@fault("an asynchronous all_gather returns zeros for the last rank", _ASYNC, condition="async, device tensors")
def late_part_is_zero() -> Iterator[None]:
    def spoil(seen: Seen) -> None:
        if seen.late and len(seen.written) > 1 and seen.first.device.type != "cpu":
            seen.written[-1].zero_()

    with spoiled(spoil, "all_gather"):
        yield


@fault("one call in four flips a bit of the first element", "test_programs_of_collectives", condition="one call in 4")
def one_call_in_four() -> Iterator[None]:
    count = Count()

    def spoil(seen: Seen) -> None:
        if count.every(4) and seen.first.numel() and seen.first.is_contiguous():
            seen.first.view(-1)[:1].view(torch.uint8)[:1].bitwise_xor_(1)

    with spoiled(spoil, *_OUT_OF_PLACE, "all_reduce", "broadcast"):
        yield


@fault(
    "all_to_all_single returns the result of the previous call",
    "test_programs_of_collectives",
    condition="from the second call of one size on",
)
def stale_exchange() -> Iterator[None]:
    before: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def spoil(seen: Seen) -> None:
        key = seen.first.numel(), seen.first.dtype
        fresh = seen.first.clone()
        if key in before:
            seen.first.copy_(before[key])
        before[key] = fresh

    with spoiled(spoil, "all_to_all_single"):
        yield
