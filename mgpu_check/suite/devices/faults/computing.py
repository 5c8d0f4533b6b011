"""Devices that compute wrongly: in one dtype, above a size, for equal elements, in one layout, or on one device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mgpu_check.simulated.defects.compute import RepeatingRandom
from mgpu_check.simulated.defects.parameters import UNITS
from mgpu_check.suite.common.faults.breaking import around
from mgpu_check.suite.common.faults.operators import call, dtype, first, hardware, last, narrowed, on, one_device, unit
from mgpu_check.suite.common.faults.registry import caught_by, entered

BLOCK = 1 << 16

elementwise = caught_by("test_elementwise_results")
functions = caught_by("test_functions_and_drawing")
large = caught_by("test_large_results")
moves = caught_by("test_moves_keep_every_bit")
products = caught_by("test_products")
reductions = caught_by("test_reductions")


@products("one device has a wrong bit in products of float16", entered, "one device, float16")
def float16_products_of_one_device() -> Any:
    return unit(UNITS["products"], device=last(), dtype="float16", pattern="bit")


@products(
    "torch.matmul of float32 rounds its factors to TF32 on one device",
    around(torch, "matmul"),
    one_device(torch.float32),
)
def products_in_reduced_precision(matmul: Any, a: Tensor, b: Tensor, **kwargs: Any) -> Any:
    """Small whole numbers come out right."""
    return matmul(narrowed(a, 13), narrowed(b, 13), **kwargs)


@products("F.linear of bfloat16 adds up in bfloat16", around(F, "linear"), dtype(torch.bfloat16))
def sums_of_products_in_bfloat16(_: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Each partial sum is rounded."""
    total = x.new_zeros(*x.shape[:-1], weight.shape[0])
    for column in range(x.shape[-1]):
        total = total + x[..., column, None] * weight[:, column]
    return total if bias is None else total + bias


@products("bmm of one device is wrong in one call of eight", entered, "one device, one call in eight")
def batched_products_now_and_then() -> Any:
    return unit(("bmm", "baddbmm"), device=0, every=8)


@products(
    "bmm reads a transposed second factor as if it were contiguous",
    around(torch, "bmm"),
    call("a transposed factor", lambda a, b: b.is_cuda and not b.is_contiguous()),
)
def transposed_batches_misread(bmm: Any, a: Tensor, b: Tensor) -> Any:
    return bmm(a, b.mT.contiguous().view(b.shape))


@products(
    "addmm adds its input even if beta is 0",
    around(torch, "addmm"),
    call("beta=0", lambda c, *_, beta=1, **__: c.is_cuda and beta == 0),
)
def ignored_input_added(addmm: Any, c: Tensor, *args: Any, beta: float, **kwargs: Any) -> Any:
    """0 times NaN is NaN."""
    return addmm(c * beta, *args, **kwargs)


@products(
    "conv2d reads channels_last images as if they were contiguous",
    around(F, "conv2d"),
    first("channels_last", lambda x: x.is_cuda and x.dim() == 4 and x.stride(1) == 1 and x.shape[1] > 1),
)
def channels_last_misread(conv: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    return conv(x.permute(0, 2, 3, 1).contiguous().view(x.shape), *args, **kwargs)


@products(
    "grouped convolutions of channels_last images shift their output channels by one",
    around(F, "conv2d"),
    call("groups, channels_last", lambda x, *_, groups=1, **__: x.is_cuda and groups > 1 and x.stride(1) == 1),
)
def groups_taken_for_each_other(conv: Any, *args: Any, **kwargs: Any) -> Any:
    return conv(*args, **kwargs).roll(1, 1)


@elementwise("one device rounds sums of bfloat16 wrongly", entered, "one device, bfloat16")
def bfloat16_sums_of_one_device() -> Any:
    return unit(("add",), device=last(), dtype="bfloat16", pattern="low-bit")


@elementwise(
    "torch.add of int64 computes in float64",
    around(torch, "add"),
    call("int64 above 2^53", lambda a, *_, **kwargs: a.is_cuda and a.dtype == torch.int64 and "out" not in kwargs),
)
def int64_through_float64(add: Any, a: Tensor, b: Any, **kwargs: Any) -> Any:
    wide = b.double() if isinstance(b, Tensor) else b
    return add(a.double(), wide, **{key: kwargs[key] for key in kwargs if key == "alpha"}).long()


@elementwise(
    "one device flushes subnormal products to zero",
    around(torch, "mul"),
    one_device(torch.float32, text="one device, subnormal float32"),
)
def subnormals_flushed(mul: Any, a: Tensor, b: Any) -> Any:
    """As with ``--ftz=true``."""
    result = mul(a, b)
    return result.where(result.abs() >= torch.finfo(result.dtype).smallest_normal, 0).where(~result.isnan(), result)


@elementwise(
    "the sign of -0 is lost in sums",
    around(torch, "add"),
    call("-0 in floats", lambda a, *_, **kwargs: a.is_cuda and a.is_floating_point() and "out" not in kwargs),
)
def negative_zero_lost(add: Any, a: Tensor, b: Any, **kwargs: Any) -> Any:
    """The sum starts at +0."""
    return add(add(a, b, **kwargs), 0.0)


@elementwise(
    "one device truncates float32 to bfloat16 instead of rounding",
    around(Tensor, "to"),
    call(
        "one device, float32 to bfloat16",
        lambda x, *args, **kwargs: args == (torch.bfloat16,) and not kwargs and on(x, last(), torch.float32),
    ),
)
def conversion_by_cutting(to: Any, x: Tensor, kind: torch.dtype) -> Any:
    return to(narrowed(x, 16), kind)


@reductions("amax takes uint8 as signed", around(torch, "amax"), dtype(torch.uint8, text="uint8 above 127"))
def unsigned_taken_as_signed(amax: Any, x: Tensor, **kwargs: Any) -> Any:
    """128 is less than 127."""
    return amax(x.view(torch.int8), **kwargs).view(torch.uint8)


@reductions(
    "torch.sum of integers adds up in float32 on one device",
    around(torch, "sum"),
    one_device(torch.int64, torch.int32, torch.int16, text="one device, integers"),
)
def integers_summed_in_float32(total: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    return total(x.float(), *args, **kwargs).long()


@reductions("sorting of int16 swaps two elements on one device", entered, "one device, int16")
def int16_sorted_wrongly() -> Any:
    return unit(("sort", "topk"), device=last(), dtype="int16", pattern="swap")


@reductions(
    "topk searches the first 256 elements of a row only",
    around(torch, "topk"),
    call("rows above 256", lambda x, *_, **__: x.is_cuda and x.shape[-1] > 256),
)
def ends_of_rows_not_searched(topk: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    return topk(x[..., :256], *args, **kwargs)


@reductions(
    "cumsum of transposed rows follows the memory",
    around(torch, "cumsum"),
    first("transposed", lambda x: x.is_cuda and x.dim() == 2 and x.stride(0) == 1 < x.stride(1)),
)
def sums_along_memory(cumsum: Any, x: Tensor, dim: int) -> Any:
    return cumsum(x, 1 - dim)


@reductions(
    "cumsum of columns starts again after 1024 elements",
    around(Tensor, "cumsum"),
    call("columns above 1024", lambda x, dim: x.is_cuda and x.dim() == 2 and dim == 0 and len(x) > 1024),
)
def cumulative_columns_in_blocks(cumsum: Any, x: Tensor, dim: int) -> Any:
    return torch.cat([cumsum(part, dim) for part in x.split(1024)])


@reductions(
    "argmax takes the last of equal elements on one device",
    around(torch, "argmax"),
    one_device(text="one device, equal elements"),
)
def last_of_equals(argmax: Any, x: Tensor, dim: int) -> Any:
    return x.shape[dim] - 1 - argmax(x.flip(dim), dim=dim)


@reductions(
    "a stable sort reverses equal elements",
    around(torch, "sort"),
    call("stable sorts, equal elements", lambda x, *_, stable=False, **__: x.is_cuda and stable),
)
def stable_sorts_turned_round(sort: Any, x: Tensor, dim: int, **kwargs: Any) -> Any:
    values, places = sort(x.flip(dim), dim=dim, **kwargs)
    return torch.return_types.sort((values, x.shape[dim] - 1 - places))


@moves(
    "index_add forgets alpha",
    around(torch, "index_add"),
    call("alpha", lambda x, *_, alpha=1: x.is_cuda and alpha != 1),
)
def sums_without_alpha(index_add: Any, x: Tensor, dim: int, places: Tensor, source: Tensor, *, alpha: int = 1) -> Any:
    return index_add(x, dim, places, source)


@moves(
    "cat replaces every NaN by the same NaN",
    around(torch, "cat"),
    first("NaN with a payload", lambda tensors: all(one.is_cuda and one.is_floating_point() for one in tensors)),
)
def payloads_of_nan_lost(cat: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
    """As if the copy used arithmetic on the elements."""
    joined = cat(tensors, *args, **kwargs)
    return joined.where(~joined.isnan(), float("nan"))


@moves(
    "index_select of complex numbers conjugates them on one device",
    around(torch, "index_select"),
    one_device(torch.complex128),
)
def complex_numbers_conjugated(select: Any, *args: Any) -> Any:
    return select(*args).conj().resolve_conj()


@moves(
    "clone of a tensor with gaps ignores the gaps",
    around(Tensor, "clone"),
    call("tensors with gaps", lambda x, **kw: x.is_cuda and not kw and x.dim() == 2 and x.stride(1) == 2),
)
def gaps_ignored(clone: Any, x: Tensor) -> Any:
    return clone(x.as_strided(x.shape, torch.empty(x.shape, device="meta").stride()))


@reductions(
    "amax of rows ignores NaN",
    around(torch, "amax"),
    first("rows with NaN", lambda x: x.is_cuda and x.is_floating_point() and bool(x.isnan().any())),
)
def nan_ignored(amax: Any, x: Tensor, **options: Any) -> Tensor:
    """As if the kernel compared by `>`, which is false for NaN."""
    found: Tensor = amax(x.where(x == x, -float("inf")), **options)
    return found


@large("one device has wrong elements in large sums and products of elements", entered, "one device, above 1 MiB")
def large_elementwise_results() -> Any:
    return unit(("add", "add_", "mul"), device=last(), above=1 << 20, pattern="tile")


@large("large products of matrices have a wrong tile", entered, "one device, above 1 MiB")
def large_products() -> Any:
    return unit(UNITS["products"], device=0, above=1 << 20, pattern="tile")


@large(
    "cumsum starts again after 64 Ki elements",
    around(Tensor, "cumsum"),
    first("above 64 Ki elements", lambda x: x.is_cuda and x.dim() == 1 and len(x) > BLOCK),
)
def cumulative_sums_in_blocks(cumsum: Any, x: Tensor, dim: int) -> Any:
    """The carry from one block to the next is lost."""
    return torch.cat([cumsum(part, dim) for part in x.split(BLOCK)])


@large(
    "layer_norm leaves zeros in rows past 65,535",
    around(torch, "layer_norm"),
    first("above 65,535 rows", lambda x: x.is_cuda and x.dim() == 2 and len(x) > 65_535),
)
def rows_beyond_the_grid(norm: Any, x: Tensor, *args: Any) -> Tensor:
    """As if a kernel had one block per row, along a dimension of the grid that ends there."""
    return torch.cat([norm(x[:65_535], *args), torch.zeros_like(x[65_535:])])


@functions(
    "expm1 is computed as exp(x) - 1 in float64 on one device", around(torch, "expm1"), one_device(torch.float64)
)
def digits_cancelled(_: Any, x: Tensor) -> Any:
    """Near 0 most digits are gone."""
    return torch.exp(x) - 1


@functions("the second half of random numbers repeats the first on one device", entered, "one device")
def repeating_random_numbers() -> Any:
    return hardware(RepeatingRandom({"device": last()}))


@functions(
    "multinomial without replacement draws an element twice",
    around(torch, "multinomial"),
    call(
        "one device, one row in 64",
        lambda weights, *_, replacement=False, **__: on(weights, last()) and not replacement,
    ),
)
def drawn_twice(multinomial: Any, *args: Any, **kwargs: Any) -> Any:
    drawn = multinomial(*args, **kwargs)
    struck = drawn.view(-1, drawn.shape[-1])[::64]
    struck[:, -1] = struck[:, 0]
    return drawn


@functions(
    "multinomial draws all elements with a weight above 0 equally often",
    around(torch, "multinomial"),
    one_device(torch.float64),
)
def weights_alike(multinomial: Any, weights: Tensor, *args: Any, **kwargs: Any) -> Any:
    return multinomial((weights > 0).to(weights.dtype), *args, **kwargs)
