"""Layers that are wrong with one option."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from mgpu_check.suite.common.faults.breaking import around
from mgpu_check.suite.common.faults.operators import call, one_device
from mgpu_check.suite.common.faults.registry import FaultRow, caught_by, register

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
    FaultRow("padding-attended", "attention in several heads on one device attends to padding",
        "test_layers_and_gradients", around(F, "multi_head_attention_forward"),
        lambda attend, *args, key_padding_mask, **options: attend(*args, **options),
        one_device() & call("padding", lambda *_, key_padding_mask=None, **__: key_padding_mask is not None)),
)  # fmt: skip
