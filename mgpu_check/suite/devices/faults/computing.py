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
from mgpu_check.suite.common.faults.registry import FaultRow, caught_by, entered, register

BLOCK = 1 << 16

elementwise = caught_by("test_elementwise_results")
functions = caught_by("test_functions_and_drawing")
moves = caught_by("test_moves_keep_every_bit")
products = caught_by("test_products")
reductions = caught_by("test_reductions")


@products("F.linear of bfloat16 adds up in bfloat16", around(F, "linear"), dtype(torch.bfloat16))
def sums_of_products_in_bfloat16(_: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Each partial sum is rounded."""
    total = x.new_zeros(*x.shape[:-1], weight.shape[0])
    for column in range(x.shape[-1]):
        total = total + x[..., column, None] * weight[:, column]
    return total if bias is None else total + bias


@elementwise("torch.add of int64 computes in float64", around(torch, "add"),
    call("int64 above 2^53",
        lambda a, *_, **kwargs: a.is_cuda and a.dtype == torch.int64 and "out" not in kwargs))  # fmt: skip
def int64_through_float64(add: Any, a: Tensor, b: Any, **kwargs: Any) -> Any:
    wide = b.double() if isinstance(b, Tensor) else b
    return add(a.double(), wide, **{key: kwargs[key] for key in kwargs if key == "alpha"}).long()


@elementwise("one device flushes subnormal products to zero", around(torch, "mul"),
    one_device(torch.float32, text="one device, subnormal float32"))  # fmt: skip
def subnormals_flushed(mul: Any, a: Tensor, b: Any) -> Any:
    """As with ``--ftz=true``."""
    result = mul(a, b)
    return result.where(result.abs() >= torch.finfo(result.dtype).smallest_normal, 0).where(~result.isnan(), result)


@reductions("a stable sort reverses equal elements", around(torch, "sort"),
    call("stable sorts, equal elements", lambda x, *_, stable=False, **__: x.is_cuda and stable))  # fmt: skip
def stable_sorts_turned_round(sort: Any, x: Tensor, dim: int, **kwargs: Any) -> Any:
    values, places = sort(x.flip(dim), dim=dim, **kwargs)
    return torch.return_types.sort((values, x.shape[dim] - 1 - places))


@moves(
    "cat replaces every NaN by the same NaN",
    around(torch, "cat"),
    first("NaN with a payload", lambda tensors: all(one.is_cuda and one.is_floating_point() for one in tensors)),
)
def payloads_of_nan_lost(cat: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
    """As if the copy used arithmetic on the elements."""
    joined = cat(tensors, *args, **kwargs)
    return joined.where(~joined.isnan(), float("nan"))


@reductions("amax of rows ignores NaN", around(torch, "amax"),
    first("rows with NaN", lambda x: x.is_cuda and x.is_floating_point() and bool(x.isnan().any())))  # fmt: skip
def nan_ignored(amax: Any, x: Tensor, **options: Any) -> Tensor:
    """As if the kernel compared by `>`, which is false for NaN."""
    found: Tensor = amax(x.where(x == x, -float("inf")), **options)
    return found


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


register(
    __name__,
    FaultRow("float16-products-of-one-device", "one device has a wrong bit in products of float16", "test_products",
        entered, lambda: unit(UNITS["products"], device=last(), dtype="float16", pattern="bit"), "one device, float16"),
    # Small whole numbers come out right.
    FaultRow("products-in-reduced-precision", "torch.matmul of float32 rounds its factors to TF32 on one device",
        "test_products", around(torch, "matmul"),
        lambda matmul, a, b, **kwargs: matmul(narrowed(a, 13), narrowed(b, 13), **kwargs), one_device(torch.float32)),
    FaultRow("batched-products-now-and-then", "bmm of one device is wrong in one call of eight", "test_products",
        entered, lambda: unit(("bmm", "baddbmm"), device=0, every=8), "one device, one call in eight"),
    FaultRow("transposed-batches-misread", "bmm reads a transposed second factor as if it were contiguous",
        "test_products", around(torch, "bmm"), lambda bmm, a, b: bmm(a, b.mT.contiguous().view(b.shape)),
        call("a transposed factor", lambda a, b: b.is_cuda and not b.is_contiguous())),
    # 0 times NaN is NaN.
    FaultRow("ignored-input-added", "addmm adds its input even if beta is 0", "test_products", around(torch, "addmm"),
        lambda addmm, c, *args, beta, **kwargs: addmm(c * beta, *args, **kwargs),
        call("beta=0", lambda c, *_, beta=1, **__: c.is_cuda and beta == 0)),
    FaultRow("channels-last-misread", "conv2d reads channels_last images as if they were contiguous", "test_products",
        around(F, "conv2d"),
        lambda conv, x, *args, **kwargs: conv(x.permute(0, 2, 3, 1).contiguous().view(x.shape), *args, **kwargs),
        first("channels_last", lambda x: x.is_cuda and x.dim() == 4 and x.stride(1) == 1 and x.shape[1] > 1)),
    FaultRow("groups-taken-for-each-other",
        "grouped convolutions of channels_last images shift their output channels by one", "test_products",
        around(F, "conv2d"), lambda conv, *args, **kwargs: conv(*args, **kwargs).roll(1, 1),
        call("groups, channels_last", lambda x, *_, groups=1, **__: x.is_cuda and groups > 1 and x.stride(1) == 1)),
    FaultRow("bfloat16-sums-of-one-device", "one device rounds sums of bfloat16 wrongly", "test_elementwise_results",
        entered, lambda: unit(("add",), device=last(), dtype="bfloat16", pattern="low-bit"), "one device, bfloat16"),
    # The sum starts at +0.
    FaultRow("negative-zero-lost", "the sign of -0 is lost in sums", "test_elementwise_results", around(torch, "add"),
        lambda add, a, b, **kwargs: add(add(a, b, **kwargs), 0.0),
        call("-0 in floats", lambda a, *_, **kwargs: a.is_cuda and a.is_floating_point() and "out" not in kwargs)),
    # 128 is less than 127.
    FaultRow("unsigned-taken-as-signed", "amax takes uint8 as signed", "test_reductions", around(torch, "amax"),
        lambda amax, x, **kwargs: amax(x.view(torch.int8), **kwargs).view(torch.uint8),
        dtype(torch.uint8, text="uint8 above 127")),
    FaultRow("integers-summed-in-float32", "torch.sum of integers adds up in float32 on one device", "test_reductions",
        around(torch, "sum"), lambda total, x, *args, **kwargs: total(x.float(), *args, **kwargs).long(),
        one_device(torch.int64, torch.int32, torch.int16, text="one device, integers")),
    FaultRow("int16-sorted-wrongly", "sorting of int16 swaps two elements on one device", "test_reductions", entered,
        lambda: unit(("sort", "topk"), device=last(), dtype="int16", pattern="swap"), "one device, int16"),
    FaultRow("ends-of-rows-not-searched", "topk searches the first 256 elements of a row only", "test_reductions",
        around(torch, "topk"), lambda topk, x, *args, **kwargs: topk(x[..., :256], *args, **kwargs),
        call("rows above 256", lambda x, *_, **__: x.is_cuda and x.shape[-1] > 256)),
    FaultRow("sums-along-memory", "cumsum of transposed rows follows the memory", "test_reductions",
        around(torch, "cumsum"), lambda cumsum, x, dim: cumsum(x, 1 - dim),
        first("transposed", lambda x: x.is_cuda and x.dim() == 2 and x.stride(0) == 1 < x.stride(1))),
    FaultRow("cumulative-columns-in-blocks", "cumsum of columns starts again after 1024 elements", "test_reductions",
        around(Tensor, "cumsum"), lambda cumsum, x, dim: torch.cat([cumsum(part, dim) for part in x.split(1024)]),
        call("columns above 1024", lambda x, dim: x.is_cuda and x.dim() == 2 and dim == 0 and len(x) > 1024)),
    FaultRow("last-of-equals", "argmax takes the last of equal elements on one device", "test_reductions",
        around(torch, "argmax"), lambda argmax, x, dim: x.shape[dim] - 1 - argmax(x.flip(dim), dim=dim),
        one_device(text="one device, equal elements")),
    FaultRow("sums-without-alpha", "index_add forgets alpha", "test_moves_keep_every_bit", around(torch, "index_add"),
        lambda index_add, x, dim, places, source, *, alpha=1: index_add(x, dim, places, source),
        call("alpha", lambda x, *_, alpha=1: x.is_cuda and alpha != 1)),
    FaultRow("complex-numbers-conjugated", "index_select of complex numbers conjugates them on one device",
        "test_moves_keep_every_bit", around(torch, "index_select"),
        lambda select, *args: select(*args).conj().resolve_conj(), one_device(torch.complex128)),
    FaultRow("gaps-ignored", "clone of a tensor with gaps ignores the gaps", "test_moves_keep_every_bit",
        around(Tensor, "clone"),
        lambda clone, x: clone(x.as_strided(x.shape, torch.empty(x.shape, device="meta").stride())),
        call("tensors with gaps", lambda x, **kw: x.is_cuda and not kw and x.dim() == 2 and x.stride(1) == 2)),
    FaultRow("large-elementwise-results", "one device has wrong elements in large sums and products of elements",
        "test_large_results", entered,
        lambda: unit(("add", "add_", "mul"), device=last(), above=1 << 20, pattern="tile"), "one device, above 1 MiB"),
    FaultRow("large-products", "large products of matrices have a wrong tile", "test_large_results", entered,
        lambda: unit(UNITS["products"], device=0, above=1 << 20, pattern="tile"), "one device, above 1 MiB"),
    # The carry from one block to the next is lost.
    FaultRow("cumulative-sums-in-blocks", "cumsum starts again after 64 Ki elements", "test_large_results",
        around(Tensor, "cumsum"), lambda cumsum, x, dim: torch.cat([cumsum(part, dim) for part in x.split(BLOCK)]),
        first("above 64 Ki elements", lambda x: x.is_cuda and x.dim() == 1 and len(x) > BLOCK)),
    # As if a kernel had one block per row, along a dimension of the grid that ends there.
    FaultRow("rows-beyond-the-grid", "layer_norm leaves zeros in rows past 65,535", "test_large_results",
        around(torch, "layer_norm"),
        lambda norm, x, *args: torch.cat([norm(x[:65_535], *args), torch.zeros_like(x[65_535:])]),
        first("above 65,535 rows", lambda x: x.is_cuda and x.dim() == 2 and len(x) > 65_535)),
    # Near 0 most digits are gone.
    FaultRow("digits-cancelled", "expm1 is computed as exp(x) - 1 in float64 on one device",
        "test_functions_and_drawing", around(torch, "expm1"), lambda _, x: torch.exp(x) - 1, one_device(torch.float64)),
    FaultRow("repeating-random-numbers", "the second half of random numbers repeats the first on one device",
        "test_functions_and_drawing", entered, lambda: hardware(RepeatingRandom({"device": last()})), "one device"),
    FaultRow("weights-alike", "multinomial draws all elements with a weight above 0 equally often",
        "test_functions_and_drawing", around(torch, "multinomial"),
        lambda multinomial, weights, *args, **kwargs: multinomial((weights > 0).to(weights.dtype), *args, **kwargs),
        one_device(torch.float64)),
    FaultRow("conversion-by-cutting", "one device truncates float32 to bfloat16 instead of rounding",
        "test_elementwise_results", around(Tensor, "to"), lambda to, x, kind: to(narrowed(x, 16), kind),
        call("one device, float32 to bfloat16",
            lambda x, *args, **kwargs: args == (torch.bfloat16,) and not kwargs and on(x, last(), torch.float32))),
)  # fmt: skip
