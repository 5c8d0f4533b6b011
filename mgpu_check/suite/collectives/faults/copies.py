"""Planted faults of collectives that copy: dtypes, sizes, layouts, asynchronous calls."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from mgpu_check.suite.collectives.faults.conditions import DEVICE, LAST, LATE, NAN, above, dtype, op
from mgpu_check.suite.collectives.faults.planting import Done, Seen, after, before, flipped, instead, unchanged
from mgpu_check.suite.common.faults.registry import FaultRow, fault, register
from mgpu_check.suite.common.faults.when import When

_COPIES, _SIZES, _LAYOUTS, _ASYNC, _PROGRAMS = (
    "test_copies_of_every_dtype", "test_sizes", "test_layouts", "test_asynchronous_collectives",
    "test_programs_of_collectives",
)  # fmt: skip
_NOT_IN_PLACE = (
    "all_gather", "all_gather_into_tensor", "scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single",
)  # fmt: skip
_3_RANKS = When("3 ranks and more", lambda seen: len(seen.written) > 2)
_1_MIB = When("above 1 MiB", lambda seen: seen.first.nbytes > 1 << 20)
_STRIDED = When("channels_last", lambda seen: not seen.first.is_contiguous())
_GAPS = When("views with gaps", lambda seen: seen.first.dim() == 1 and not seen.first.is_contiguous())
_SCALAR = When("no dimensions", lambda seen: seen.first.dim() == 0)


def _in_place(seen: Seen) -> bool:
    output, given = seen.args[:2]
    begin = given.storage_offset() - output.storage_offset()
    one_storage = output.untyped_storage().data_ptr() == given.untyped_storage().data_ptr()
    return bool(one_storage and 0 < begin <= output.numel() - given.numel())


def _storage(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)


def _behind(tensor: torch.Tensor) -> torch.Tensor:
    """Return the element behind a tensor in its storage, if there is one."""
    end = tensor.storage_offset() + tensor.numel()
    return _storage(tensor)[end : end + 1]


def _of_last_rank(seen: Seen) -> list[torch.Tensor]:
    return seen.written[1:][-1:]


register(
    __name__,
    FaultRow("least-of-scalars", "a minimum of scalars is too large", "test_options_of_collectives",
        after("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor"),
        lambda seen: [tensor.add_(1) for tensor in seen.written], op("MIN") & _SCALAR),
    FaultRow("payload-of-nan-lost", "broadcast replaces every NaN by the same NaN", _COPIES, after("broadcast"),
        lambda seen: seen.first.masked_fill_(seen.first.isnan(), torch.nan), dtype("float16") & NAN),
    FaultRow("integers-through-floats", "integers go through float64", _COPIES, after("all_gather_into_tensor"),
        lambda seen: seen.first.copy_(seen.first.double().clamp(-(2.0**62), 2.0**62)), dtype("int64")),
    FaultRow("last-two-swapped", "all_gather swaps the tensors of the last two ranks", _COPIES, instead("all_gather"),
        lambda seen: seen.call([*seen.written[:-2], seen.written[-1], seen.written[-2]]), _3_RANKS),
    FaultRow("gather-misses-the-last", "gather leaves out the tensor of the last rank", _COPIES, after("gather"),
        lambda seen: [tensor.zero_() for tensor in _of_last_rank(seen)], dtype("uint8")),
    FaultRow("conjugated", "all_to_all_single conjugates complex numbers", _COPIES, after("all_to_all_single"),
        lambda seen: torch.view_as_real(seen.first)[..., 1].neg_(), dtype("complex64")),
    FaultRow("imaginary-parts-lost-on-the-way", "imaginary parts are lost on the way", _COPIES,
        after("broadcast", "all_gather", "scatter"), lambda seen: [tensor.imag.zero_() for tensor in seen.written],
        When("complex tensors on the CPU, two ranks and more",
            lambda seen: seen.size > 1 and seen.first.is_complex() and seen.first.device.type == "cpu")),
    FaultRow("long-broadcast-cut", "a long broadcast loses its end on the last rank", _SIZES, after("broadcast"),
        lambda seen: seen.first.reshape(-1)[1 << 16 :].zero_(), above(1 << 16) & LAST),
    FaultRow("long-gather-wraps", "a long all_gather_into_tensor repeats its first element", _SIZES,
        after("all_gather_into_tensor"), lambda seen: seen.first.view(-1)[-3:].copy_(seen.first.view(-1)[:3]), _1_MIB),
    FaultRow("long-exchange-shifted", "all_to_all_single shifts long parts by an element", _SIZES,
        after("all_to_all_single"), lambda seen: seen.first.copy_(seen.first.roll(1)), above(4096)),
    FaultRow("gathered-page-repeated", "gather repeats a page of long tensors", _SIZES, after("gather"),
        lambda seen: [tensor[4096:].copy_(tensor[0]) for tensor in seen.written], above(4096)),
    FaultRow("written-behind", "all_gather writes an element behind the last tensor of the list", _LAYOUTS,
        after("all_gather"), lambda seen: _behind(seen.written[-1]).zero_(), LAST),
    FaultRow("written-before", "broadcast clears the element before a tensor", (_LAYOUTS, _COPIES), after("broadcast"),
        lambda seen: _storage(seen.first)[seen.first.storage_offset() - 1].zero_(),
        When("tensors with an offset in their storage",
             lambda seen: bool(seen.first.numel() and seen.first.storage_offset()))),
    FaultRow("longest-part-cut", "reduce_scatter of unequal parts loses the end of parts that are not the first",
        _LAYOUTS, after("reduce_scatter"), lambda seen: seen.first[seen.args[1][0].numel() :].zero_(),
        When("parts of different sizes", lambda seen: len({one.numel() for one in seen.args[1]}) > 1)),
    FaultRow("longest-tensor-cut", "all_gather of unequal tensors loses what is longer than the own one", _LAYOUTS,
        after("all_gather"), lambda seen: [one[seen.args[1].numel() :].zero_() for one in seen.written],
        When("tensors of different sizes", lambda seen: len({one.numel() for one in seen.written}) > 1)),
    FaultRow("splits-reversed", "uneven splits are taken in the wrong order", _LAYOUTS, after("all_to_all_single"),
        lambda seen: seen.first.copy_(torch.cat([*(parts := seen.first.split(seen.splits(2)))[1:], parts[0]])),
        When("uneven splits", lambda seen: len(seen.splits(2)) > 1)),
    FaultRow("own-part-lost-in-place", "all_gather_into_tensor in place loses the rank's own part", _LAYOUTS,
        after("all_gather_into_tensor"), lambda seen: seen.args[1].zero_(), When("in place", _in_place)),
    FaultRow("stacked-by-columns", "the ranks' parts of a stacked tensor are interleaved", _LAYOUTS,
        after("all_gather_into_tensor"),
        lambda seen: seen.first.copy_(seen.first.flatten().view(-1, len(seen.first)).t().reshape(seen.first.shape)),
        When("tensors with a dimension for the ranks", lambda seen: seen.first.dim() != seen.args[1].dim())),
    FaultRow("broadcast-copy-dropped", "broadcast of a channels_last tensor fills a copy and drops it", _LAYOUTS,
        instead("broadcast", "all_reduce"), lambda seen: seen.call(seen.first.contiguous()), _STRIDED),
    FaultRow("late-copy-dropped", "an asynchronous all_reduce of a channels_last tensor reduces a copy and drops it",
        _LAYOUTS, instead("all_reduce"), lambda seen: seen.call(seen.first.contiguous()), LATE & _STRIDED),
    FaultRow("reduced-gaps-dropped", "all_reduce of a view with gaps reduces a copy and drops it", _LAYOUTS,
        instead("all_reduce"), lambda seen: seen.call(seen.first.contiguous()), _GAPS),
    FaultRow("late-up-to-a-page", "an asynchronous all_reduce adds up only the first 4,096 elements", _ASYNC,
        unchanged("all_reduce"), lambda seen: seen.first.view(-1)[4096:], LATE & above(4096)),
    FaultRow("late-end-of-long-parts", "an asynchronous scatter completes before the end of long parts has arrived",
        _ASYNC, unchanged("scatter"), lambda seen: seen.first.view(-1)[1 << 16 :], LATE & above(1 << 16)),
    FaultRow("late-part-is-zero", "an asynchronous all_gather returns zeros for the last rank", _ASYNC,
        after("all_gather"), lambda seen: [tensor.zero_() for tensor in _of_last_rank(seen)], LATE & DEVICE),
    FaultRow("one-call-in-four", "one call in four flips a bit of the first element", _PROGRAMS,
        after(*_NOT_IN_PLACE, "all_reduce", "broadcast"),
        lambda seen: seen.every(4) and seen.first.is_contiguous() and flipped(seen.first), "one call in 4"),
)  # fmt: skip


@fault("scatter swaps the halves of numbers", _COPIES, by=after("scatter"), when=dtype("float64") & LAST)
def halves_of_numbers_swapped(seen: Seen) -> None:
    halves = seen.first.view(torch.int32)
    halves.copy_(halves.view(-1, 2).flip(1).reshape(halves.shape).clone())


@fault("all_to_all gives each rank the data for the next rank", _COPIES, "test_groups", by=instead("all_to_all"))
def exchange_off_by_one(seen: Seen) -> Any:
    output, given = seen.args[0], list(seen.args[1])
    return seen.call(output, given[1:] + given[:1]) if len({part.numel() for part in given}) == 1 else NotImplemented


@fault("an asynchronous all_reduce counts rank 0 twice", _ASYNC, by=before("all_reduce"), when=LATE)
def counted_twice_when_late(seen: Seen) -> None:
    if seen.rank == 0 and seen.op in ("SUM", "PRODUCT"):
        seen.first.add_(seen.first)


@fault("the third asynchronous all_reduce in a row is doubled", _ASYNC,
       by=before(*_NOT_IN_PLACE, "all_reduce", "broadcast"), when=LATE)  # fmt: skip
def third_in_a_row_doubled(seen: Seen) -> None:
    mine = seen.real.__name__ == "all_reduce"
    seen.kept["in a row"] = seen.kept.get("in a row", 0) + 1 if mine else 0
    if seen.kept["in a row"] == 3:
        seen.first.add_(seen.first)


@fault("waiting for an asynchronous scatter does not wait", _ASYNC, by=instead("scatter"), when=LATE & DEVICE)
def not_waited_for(seen: Seen) -> Any:
    seen.kept[len(seen.kept)] = work = seen.call()  # work that is dropped may be waited for
    return Done() if isinstance(work, dist.Work) else work


@fault("outputs in one storage are filled in the order of their memory", _COPIES, by=instead("all_gather"),
       when="outputs whose memory is not in the order of the ranks")  # fmt: skip
def gathered_as_they_lie(seen: Seen) -> Any:
    one = len({part.untyped_storage().data_ptr() for part in seen.written}) == 1
    return seen.call(sorted(seen.written, key=torch.Tensor.storage_offset)) if one else NotImplemented


@fault("all_to_all_single returns the result of the previous call", _PROGRAMS, by=after("all_to_all_single"),
       when="from the second call of one size on")  # fmt: skip
def stale_exchange(seen: Seen) -> None:
    key, fresh = (seen.first.numel(), seen.first.dtype), seen.first.clone()
    seen.first.copy_(seen.kept.get(key, fresh))
    seen.kept[key] = fresh
