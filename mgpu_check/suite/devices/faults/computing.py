"""Devices that compute wrongly, most of them in one dtype, above a size, or on one device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional as F

from mgpu_check.simulated.defects.compute import RepeatingRandom
from mgpu_check.suite.common.faults.operators import altered, hardware, last, narrowed, on, unit
from mgpu_check.suite.common.faults.registry import fault

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot")


@fault("one device has a wrong bit in products of float16", "test_products", condition="one device, float16")
def float16_products_of_one_device() -> Iterator[None]:
    """A unit of the last device."""
    with unit(PRODUCTS, device=last(), dtype="float16", pattern="bit"):
        yield


@fault(
    "torch.matmul of float32 rounds its factors to TF32 on one device", "test_products", condition="one device, float32"
)
def products_in_reduced_precision() -> Iterator[None]:
    """Small whole numbers come out right."""

    def instead(matmul: Any, a: torch.Tensor, b: torch.Tensor, **kwargs: Any) -> Any:
        return matmul(narrowed(a, 13), narrowed(b, 13), **kwargs)

    with altered(torch, "matmul", lambda a, b, **_: on(a, last(), torch.float32), instead):
        yield


@fault("F.linear of bfloat16 adds up in bfloat16", "test_products", condition="bfloat16")
def sums_of_products_in_bfloat16() -> Iterator[None]:
    """Each partial sum is rounded."""

    def instead(linear: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        total = x.new_zeros(*x.shape[:-1], weight.shape[0])
        for column in range(x.shape[-1]):
            total = total + x[..., column, None] * weight[:, column]
        return total if bias is None else total + bias

    with altered(F, "linear", lambda x, *_, **__: x.is_cuda and x.dtype == torch.bfloat16, instead):
        yield


@fault("bmm of one device is wrong in one call of eight", "test_products", condition="one device, one call in eight")
def batched_products_now_and_then() -> Iterator[None]:
    """Every eighth call has a wrong element."""
    with unit(("bmm", "baddbmm"), device=0, every=8):
        yield


@fault("conv2d reads channels_last images as if they were contiguous", "test_products", condition="channels_last")
def channels_last_misread() -> Iterator[None]:
    """The memory is read in another order."""

    def instead(conv: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        n, c, h, w = x.shape
        return conv(x.permute(0, 2, 3, 1).contiguous().view(n, c, h, w), *args, **kwargs)

    def concerns(x: torch.Tensor, *_: Any, **__: Any) -> bool:
        return x.is_cuda and x.dim() == 4 and x.stride(1) == 1 and x.shape[1] > 1

    with altered(F, "conv2d", concerns, instead):
        yield


@fault("one device rounds sums of bfloat16 wrongly", "test_elementwise_results", condition="one device, bfloat16")
def bfloat16_sums_of_one_device() -> Iterator[None]:
    """One element of each sum is off by its lowest bit."""
    with unit(("add",), device=last(), dtype="bfloat16", pattern="low-bit"):
        yield


@fault("torch.add of int64 computes in float64", "test_elementwise_results", condition="int64 above 2^53")
def int64_through_float64() -> Iterator[None]:
    """Whole numbers above 2^53 are rounded."""

    def instead(add: Any, a: torch.Tensor, b: Any, **kwargs: Any) -> Any:
        wide = b.double() if isinstance(b, torch.Tensor) else b
        return add(a.double(), wide, **{key: kwargs[key] for key in kwargs if key == "alpha"}).long()

    with altered(torch, "add", lambda a, *_, **kw: a.is_cuda and a.dtype == torch.int64 and "out" not in kw, instead):
        yield


@fault(
    "one device flushes subnormal products to zero",
    "test_elementwise_results",
    condition="one device, subnormal float32",
)
def subnormals_flushed() -> Iterator[None]:
    """As with ``--ftz=true``."""

    def instead(mul: Any, a: torch.Tensor, b: Any) -> Any:
        result = mul(a, b)
        return result.where(result.abs() >= torch.finfo(result.dtype).smallest_normal, 0).where(~result.isnan(), result)

    with altered(torch, "mul", lambda a, *_, **__: on(a, last(), torch.float32), instead):
        yield


@fault("the sign of -0 is lost in sums", "test_elementwise_results", condition="-0 in floats")
def negative_zero_lost() -> Iterator[None]:
    """The sum starts at +0."""

    def instead(add: Any, a: torch.Tensor, b: Any, **kwargs: Any) -> Any:
        return add(add(a, b, **kwargs), 0.0)

    def concerns(a: torch.Tensor, *_: Any, **kwargs: Any) -> bool:
        return a.is_cuda and a.is_floating_point() and "out" not in kwargs

    with altered(torch, "add", concerns, instead):
        yield


@fault(
    "one device truncates float32 to bfloat16 instead of rounding",
    "test_elementwise_results",
    condition="one device, float32 to bfloat16",
)
def conversion_by_cutting() -> Iterator[None]:
    """The lower half of each number is dropped."""

    def instead(to: Any, x: torch.Tensor, dtype: torch.dtype) -> Any:
        return to(narrowed(x, 16), dtype)

    def concerns(x: torch.Tensor, *args: Any, **kwargs: Any) -> bool:
        return args == (torch.bfloat16,) and not kwargs and on(x, last(), torch.float32)

    with altered(torch.Tensor, "to", concerns, instead):
        yield


@fault("amax takes uint8 as signed", "test_reductions", condition="uint8 above 127")
def unsigned_taken_as_signed() -> Iterator[None]:
    """128 is less than 127."""

    def instead(amax: Any, x: torch.Tensor, **kwargs: Any) -> Any:
        return amax(x.view(torch.int8), **kwargs).view(torch.uint8)

    with altered(torch, "amax", lambda x, **_: x.is_cuda and x.dtype == torch.uint8, instead):
        yield


@fault("torch.sum of integers adds up in float32 on one device", "test_reductions", condition="one device, integers")
def integers_summed_in_float32() -> Iterator[None]:
    """Sums above 2^24 are rounded."""

    def instead(total: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return total(x.float(), *args, **kwargs).long()

    dtypes = torch.int64, torch.int32, torch.int16
    with altered(torch, "sum", lambda x, *_, **__: on(x, last(), *dtypes), instead):
        yield


@fault("sorting of int16 swaps two elements on one device", "test_reductions", condition="one device, int16")
def int16_sorted_wrongly() -> Iterator[None]:
    """The first element and the last."""
    with unit(("sort", "topk"), device=last(), dtype="int16", pattern="swap"):
        yield


@fault("cat replaces every NaN by the same NaN", "test_moves_keep_every_bit", condition="NaN with a payload")
def payloads_of_nan_lost() -> Iterator[None]:
    """As if the copy used arithmetic on the elements."""

    def instead(cat: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        joined = cat(tensors, *args, **kwargs)
        return joined.where(~joined.isnan(), float("nan"))

    def concerns(tensors: Any, *_: Any, **__: Any) -> bool:
        return all(one.is_cuda and one.is_floating_point() for one in tensors)

    with altered(torch, "cat", concerns, instead):
        yield


@fault(
    "index_select of complex numbers conjugates them on one device",
    "test_moves_keep_every_bit",
    condition="one device, complex128",
)
def complex_numbers_conjugated() -> Iterator[None]:
    """The imaginary part changes its sign."""

    def instead(select: Any, *args: Any) -> Any:
        return select(*args).conj().resolve_conj()

    with altered(torch, "index_select", lambda x, *_: on(x, last(), torch.complex128), instead):
        yield


@fault("clone of a tensor with gaps ignores the gaps", "test_moves_keep_every_bit", condition="tensors with gaps")
def gaps_ignored() -> Iterator[None]:
    """Strides are computed as for a contiguous tensor."""

    def instead(clone: Any, x: torch.Tensor) -> Any:
        return clone(x.as_strided(x.shape, torch.empty(x.shape, device="meta").stride()))

    def concerns(x: torch.Tensor, **kwargs: Any) -> bool:
        return x.is_cuda and not kwargs and x.dim() == 2 and x.stride(1) == 2

    with altered(torch.Tensor, "clone", concerns, instead):
        yield


@fault(
    "softmax of float32 is computed in bfloat16 on one device",
    "test_layers_and_gradients",
    condition="one device, float32",
)
def softmax_in_bfloat16() -> Iterator[None]:
    """Of 24 bits 8 are left."""

    def instead(softmax: Any, x: torch.Tensor, **kwargs: Any) -> Any:
        return softmax(x.bfloat16(), **kwargs).float()

    with altered(F, "softmax", lambda x, **_: on(x, last(), torch.float32), instead):
        yield


@fault("gelu has the gradient of its tanh approximation", "test_layers_and_gradients", condition="gradients")
def gradient_of_another_gelu() -> Iterator[None]:
    """Forward is right."""

    def instead(gelu: Any, x: torch.Tensor) -> Any:
        near = gelu(x, approximate="tanh")
        return near + (gelu(x) - near).detach()

    with altered(F, "gelu", lambda x: x.is_cuda and x.requires_grad, instead):
        yield


@fault(
    "one device has wrong elements in large sums and products of elements",
    "test_large_results",
    condition="one device, above 1 MiB",
)
def large_elementwise_results() -> Iterator[None]:
    """A run of 16 elements is wrong."""
    with unit(("add", "add_", "mul"), device=last(), above=1 << 20, pattern="tile"):
        yield


@fault("large products of matrices have a wrong tile", "test_large_results", condition="one device, above 1 MiB")
def large_products() -> Iterator[None]:
    """On the first device, for results above a megabyte."""
    with unit(PRODUCTS, device=0, above=1 << 20, pattern="tile"):
        yield


@fault("cumsum starts again after 64 Ki elements", "test_large_results", condition="above 64 Ki elements")
def cumulative_sums_in_blocks() -> Iterator[None]:
    """The carry from one block to the next is lost."""
    block = 1 << 16

    def instead(cumsum: Any, x: torch.Tensor, dim: int) -> Any:
        return torch.cat([cumsum(part, dim) for part in x.split(block)])

    with altered(torch.Tensor, "cumsum", lambda x, *_, **__: x.is_cuda and x.dim() == 1 and len(x) > block, instead):
        yield


@fault(
    "expm1 is computed as exp(x) - 1 in float64 on one device",
    "test_functions_and_drawing",
    condition="one device, float64",
)
def digits_cancelled() -> Iterator[None]:
    """Near 0 most digits are gone."""
    with altered(torch, "expm1", lambda x: on(x, last(), torch.float64), lambda _, x: torch.exp(x) - 1):
        yield


@fault(
    "the second half of random numbers repeats the first on one device",
    "test_functions_and_drawing",
    condition="one device",
)
def repeating_random_numbers() -> Iterator[None]:
    """The counter is not advanced."""
    with hardware(RepeatingRandom({"device": last()})):
        yield
