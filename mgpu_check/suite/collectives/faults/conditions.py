"""Conditions of faults of collectives: the calls that they affect."""

from __future__ import annotations

import torch
import torch.distributed as dist

from mgpu_check.suite.common.faults.conditions import is_last
from mgpu_check.suite.common.faults.when import When

LAST = When("one rank", lambda *args, **kwargs: is_last())
LATE = When("async", lambda seen: seen.late)
DEVICE = When("device tensors", lambda seen: seen.first.device.type != "cpu")
NAN = When("NaN", lambda seen: bool(seen.first.isnan().any()))
GROUPS = When("groups", lambda seen: seen.group is not None and seen.size > 1)
SOME = When("groups of some ranks", lambda seen: 1 < seen.size < dist.get_world_size())


def op(name: str) -> When:
    """Select reductions with one operation."""
    return When(name, lambda seen: seen.op == name)


def dtype(name: str) -> When:
    """Select calls that write tensors of one dtype."""
    return When(name, lambda seen: seen.first.dtype is getattr(torch, name))


def above(elements: int) -> When:
    """Select calls whose first written tensor has more than this number of elements."""
    large = elements >= 1 << 20
    words = f"{elements:,}" if elements < 1 << 16 else f"{elements >> 20} Mi" if large else f"{elements >> 10} Ki"
    return When(f"above {words} elements", lambda seen: seen.first.numel() > elements)
