"""Operators that are wrong in backward, in one dtype, with one option, in one layout, or by another name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mgpu_check.suite.common.faults.breaking import around
from mgpu_check.suite.common.faults.operators import call, dtype, first, one_device
from mgpu_check.suite.common.faults.registry import caught_by
from mgpu_check.suite.devices.faults.layers import halved_gradient

layers = caught_by("test_layers_and_gradients")
samples = caught_by("test_samples_of_operators")


@samples(
    "the gradient of logcumsumexp is halved on one device",
    around(torch, "logcumsumexp"),
    one_device() & first("gradients", lambda x: x.requires_grad),
)
def gradient_of_cumulative_sums_halved(logcumsumexp: Any, x: Tensor, *args: Any, **options: Any) -> Any:
    return logcumsumexp(halved_gradient(x), *args, **options)


@samples("frac of bfloat16 is the distance to the integer below", around(torch, "frac"), dtype(torch.bfloat16))
def fraction_above_the_floor(_: Any, x: Tensor) -> Tensor:
    return x - x.floor()


@samples(
    "addr ignores alpha",
    around(torch, "addr"),
    call("alpha is not 1", lambda x, *_, alpha=1, **__: x.is_cuda and alpha != 1),
)
def factor_of_outer_products_ignored(addr: Any, *args: Any, alpha: Any, **options: Any) -> Any:
    return addr(*args, **options)


@samples(
    "kron reads a transposed matrix as if it were contiguous",
    around(torch, "kron"),
    first("transposed", lambda x: x.is_cuda and x.dim() == 2 and x.t().is_contiguous() and not x.is_contiguous()),
)
def transposed_matrix_misread(kron: Any, x: Tensor, y: Tensor) -> Any:
    return kron(x.t().reshape(x.shape), y)


@samples("vdot does not conjugate", around(torch, "vdot"), dtype(torch.complex64))
def vdot_is_dot(_: Any, a: Tensor, b: Tensor) -> Tensor:
    return torch.dot(a, b)


@samples("arctan2 exchanges its operands, and atan2 does not", around(torch, "arctan2"), dtype())
def alias_with_exchanged_operands(arctan2: Any, a: Tensor, b: Tensor) -> Any:
    return arctan2(b, a)


@samples(
    "grid_sample rounds to the pixel above",
    around(F, "grid_sample"),
    call("nearest", lambda x, *_, mode="bilinear", **__: x.is_cuda and mode == "nearest"),
)
def pixel_above(sample: Any, x: Tensor, grid: Tensor, **options: Any) -> Any:
    return sample(x, grid + 0.25, **options)


@layers(
    "attention in several heads on one device attends to padding",
    around(F, "multi_head_attention_forward"),
    one_device() & call("padding", lambda *_, key_padding_mask=None, **__: key_padding_mask is not None),
)
def padding_attended(attend: Any, *args: Any, key_padding_mask: Tensor, **options: Any) -> Any:
    return attend(*args, **options)


@layers(
    "pooling on one device leaves out incomplete windows",
    around(F, "lp_pool1d", "lp_pool2d"),
    one_device() & call("ceil_mode", lambda x, norm, size, stride=None, ceil_mode=False: ceil_mode),
)
def incomplete_windows_left_out(pool: Any, x: Tensor, norm: float, size: int, stride: int, ceil_mode: bool) -> Any:
    whole = pool(x, norm, size, stride, ceil_mode)
    part = pool(x, norm, size, stride)
    whole.narrow(-1, part.shape[-1], whole.shape[-1] - part.shape[-1]).zero_()
    return whole
