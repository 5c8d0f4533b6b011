"""Check `torch.cuda.nccl`: collectives of one process over the tensors of its devices."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.cuda import nccl

from mgpu_check.asserts.collectives import same_bits
from mgpu_check.errors import AllreduceMismatch

_MAX = 2
"""The number of NCCL's operation, which torch does not name."""


def assert_nccl_calls(devices: Sequence[torch.device], seed: int) -> None:
    """Assert that each function of `torch.cuda.nccl` gives the right results on all devices.

    Raises:
        AllreduceMismatch: names function and device; `.ranks` has its index among the devices.
    """
    size = len(devices)
    parts = [((torch.arange(6 * size) * 7 + seed + 5 * place) % 31).float() for place in range(size)]
    stacked = torch.stack(parts)
    total, largest, whole = stacked.sum(0), stacked.amax(0), torch.cat(parts)
    root = seed % size
    streams = [torch.cuda.current_stream(device) for device in devices]

    def placed() -> list[torch.Tensor]:
        return [part.to(device) for part, device in zip(parts, devices, strict=True)]

    def empty(count: int) -> list[torch.Tensor]:
        return [torch.zeros(count, device=device) for device in devices]

    def judge(what: str, got: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> None:
        for place, (one, other) in enumerate(zip(got, right, strict=True)):
            if not same_bits(other, one.cpu()):
                text = f"torch.cuda.nccl.{what}: {one.tolist()} on {one.device}, expected {other.tolist()}"
                raise AllreduceMismatch(text, ranks=[place])

    inputs = placed()
    nccl.all_reduce(inputs)
    judge("all_reduce in place", inputs, [total] * size)
    inputs, outputs = placed(), empty(6 * size)
    nccl.all_reduce(inputs, outputs, _MAX, streams)
    judge("all_reduce of the maximum", [*inputs, *outputs], [*parts, *[largest] * size])
    inputs, output = placed(), torch.zeros(6 * size, device=devices[root])
    nccl.reduce(inputs, output, root, _MAX, streams)
    judge(f"reduce of the maximum to {root}", [*inputs, output], [*parts, largest])
    inputs = placed()
    nccl.broadcast(inputs, root, streams)
    judge(f"broadcast from {root}", inputs, [parts[root]] * size)
    inputs, outputs = placed(), empty(6 * size * size)
    nccl.all_gather(inputs, outputs, streams)
    judge("all_gather", [*inputs, *outputs], [*parts, *[whole] * size])
    for op, right in ((0, total), (_MAX, largest)):
        inputs, outputs = placed(), empty(6)
        nccl.reduce_scatter(inputs, outputs, op, streams)
        judge(f"reduce_scatter, operation {op}", [*inputs, *outputs], [*parts, *right.chunk(size)])
