"""Operators that are wrong in backward, in one dtype, with one option, in one layout, or by another name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mgpu_check.suite.common.faults.breaking import around
from mgpu_check.suite.common.faults.operators import call, dtype, first, one_device
from mgpu_check.suite.common.faults.registry import FaultRow, caught_by, register
from mgpu_check.suite.devices.faults.layers import halved_gradient

layers = caught_by("test_layers_and_gradients")


@layers("pooling on one device leaves out incomplete windows", around(F, "lp_pool1d", "lp_pool2d"),
    one_device() & call("ceil_mode", lambda x, norm, size, stride=None, ceil_mode=False: ceil_mode))  # fmt: skip
def incomplete_windows_left_out(pool: Any, x: Tensor, norm: float, size: int, stride: int, ceil_mode: bool) -> Any:
    whole = pool(x, norm, size, stride, ceil_mode)
    part = pool(x, norm, size, stride)
    whole.narrow(-1, part.shape[-1], whole.shape[-1] - part.shape[-1]).zero_()
    return whole


register(
    __name__,
    FaultRow("gradient-of-cumulative-sums-halved", "the gradient of logcumsumexp is halved on one device",
        "test_samples_of_operators", around(torch, "logcumsumexp"),
        lambda logcumsumexp, x, *args, **options: logcumsumexp(halved_gradient(x), *args, **options),
        one_device() & first("gradients", lambda x: x.requires_grad)),
    FaultRow("fraction-above-the-floor", "frac of bfloat16 is the distance to the integer below",
        "test_samples_of_operators", around(torch, "frac"), lambda _, x: x - x.floor(), dtype(torch.bfloat16)),
    FaultRow("factor-of-outer-products-ignored", "addr ignores alpha", "test_samples_of_operators",
        around(torch, "addr"), lambda addr, *args, alpha, **options: addr(*args, **options),
        call("alpha is not 1", lambda x, *_, alpha=1, **__: x.is_cuda and alpha != 1)),
    FaultRow("transposed-matrix-misread", "kron reads a transposed matrix as if it were contiguous",
        "test_samples_of_operators", around(torch, "kron"), lambda kron, x, y: kron(x.t().reshape(x.shape), y),
        first("transposed", lambda x: x.is_cuda and x.dim() == 2 and x.t().is_contiguous() and not x.is_contiguous())),
    FaultRow("vdot-is-dot", "vdot does not conjugate", "test_samples_of_operators", around(torch, "vdot"),
        lambda _, a, b: torch.dot(a, b), dtype(torch.complex64)),
    FaultRow("alias-with-exchanged-operands", "arctan2 exchanges its operands, and atan2 does not",
        "test_samples_of_operators", around(torch, "arctan2"), lambda arctan2, a, b: arctan2(b, a), dtype()),
    FaultRow("pixel-above", "grid_sample rounds to the pixel above", "test_samples_of_operators",
        around(F, "grid_sample"), lambda sample, x, grid, **options: sample(x, grid + 0.25, **options),
        call("nearest", lambda x, *_, mode="bilinear", **__: x.is_cuda and mode == "nearest")),
    FaultRow("padding-attended", "attention in several heads on one device attends to padding",
        "test_layers_and_gradients", around(F, "multi_head_attention_forward"),
        lambda attend, *args, key_padding_mask, **options: attend(*args, **options),
        one_device() & call("padding", lambda *_, key_padding_mask=None, **__: key_padding_mask is not None)),
)  # fmt: skip
