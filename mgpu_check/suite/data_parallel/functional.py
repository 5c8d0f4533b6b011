"""Compare the functional form of DataParallel, and its four parts, with the module on the CPU, bit for bit."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import parallel

from mgpu_check.suite.data_parallel.results import (
    Devices,
    both_ways,
    distinct_rows,
    indices_of,
    refused_by_mistake,
    require_same,
    told,
)


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[3.0]]))

    def forward(self, x: torch.Tensor, *, shift: torch.Tensor | float = 0.0, sign: int = 1) -> torch.Tensor:
        return sign * (x * self.weight) + shift


def assert_functional_form_agrees(devices: Devices, rows: int, position: int, seed: int) -> None:
    """Assert that `data_parallel`, with each of its arguments, gives the outputs and gradients of the module.

    Its four parts must do so too, when they are called one after the other as in PyTorch's tutorial. The output
    device is the one at `position`, modulo the number of devices.
    """

    for number, order in enumerate(both_ways(devices)):
        _assert_parts_agree(order, distinct_rows(max(rows, 1), seed))
        for dim in (0, 1):
            x, shift = distinct_rows(max(rows, 1), seed), distinct_rows(max(rows, 1), seed + 1)
            home = order[(position + number + dim) % len(order)]
            model, alone = _Scaled().to(order[0]), _Scaled()
            keywords = {"shift": shift, "sign": -1}
            what = f"data_parallel on {', '.join(map(str, order))}, output_device={home}, dim={dim}"
            with refused_by_mistake(what):
                got = parallel.data_parallel(model, x, told(order), home, dim, keywords)
            expected = alone(x, **keywords)
            require_same(f"{what}: the output", got.detach(), expected.detach(), home if len(order) > 1 else order[0])
            factors = distinct_rows(max(rows, 1), seed + 2)
            (got * factors.to(got.device)).sum().backward()
            (expected * factors).sum().backward()
            require_same(f"{what}: the gradient", model.weight.grad, alone.weight.grad, order[0])


def _assert_parts_agree(order: Devices, x: torch.Tensor) -> None:
    """Assert that scatter, replicate, parallel_apply and gather give the outputs and gradients of the module."""
    model, indices = _Scaled().to(order[0]), indices_of(order)
    inputs = parallel.scatter(x.to(order[0]), indices)
    keywords = [{"shift": float(part), "sign": -1} for part in range(len(inputs))]
    outputs = parallel.parallel_apply(parallel.replicate(model, indices)[: len(inputs)], inputs, keywords)
    got = parallel.gather(outputs, order[-1])
    what = f"scatter, replicate, parallel_apply and gather on {', '.join(map(str, order))}"
    shifts = torch.cat([torch.full((len(part), 1), float(number)) for number, part in enumerate(inputs)])
    require_same(f"{what}: the output", got.detach(), x * -3 + shifts, order[-1])
    got.sum().backward()
    require_same(f"{what}: the gradient", model.weight.grad, -x.sum().view(1, 1), order[0])
