"""Check BatchNorm with momentum=None, whose running statistics are the plain average over all batches so far."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from mgpu_check.numerics.differences import difference
from mgpu_check.suite.common.whole_numbers.reference import buffers_of

STEPS = 3
_CHANNELS = 3


def averaging() -> nn.BatchNorm1d:
    """Return a BatchNorm layer with averaged statistics, on the CPU."""
    return nn.BatchNorm1d(_CHANNELS, momentum=None)


def drawn(rows: int, seed: int) -> list[torch.Tensor]:
    """Return a batch of whole numbers for each step, on the CPU; the statistics of the batches differ widely."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(-3, 4, (rows, _CHANNELS), generator=generator).float() * step + step
        for step in range(1, STEPS + 1)
    ]


def wrong_statistics(layer: nn.BatchNorm1d, batches: Sequence[torch.Tensor]) -> str:
    """Describe the first statistic that is wrong after these batches; "" if all are right.

    In a batch of n rows a mean and a variance are sums of n terms, each at most the square of the largest number. About
    eight more roundings follow in each step.
    """
    exact = [batch.double() for batch in batches]
    largest = max(float(batch.square().max()) for batch in exact)
    bound = len(exact) * (max(map(len, exact)) + 8) * torch.finfo(torch.float32).eps * max(largest, 1.0)
    for name, expected, tolerance in (
        ("running_mean", torch.stack([batch.mean(0) for batch in exact]).mean(0), bound),
        ("running_var", torch.stack([batch.var(0) for batch in exact]).mean(0), bound),
        ("num_batches_tracked", torch.tensor(len(exact)), 0.0),
    ):
        off = difference(buffers_of(layer)[name], expected, tolerance)
        if off is not None:
            return f"{name} after {len(exact)} batches: {off}"
    return ""
