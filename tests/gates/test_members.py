"""A gate reads models whose authors have replaced or overridden the methods that list what a module holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

from mgpu_check import assert_step_scales
from mgpu_check.errors import ScalingMismatch


class Shadowing(nn.Linear):
    modules = buffers = named_buffers = state_dict = None

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("named_modules was called")

    def __bool__(self) -> bool:
        raise RuntimeError("the truth value was asked for")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.extra = Shadowing(2, 1), nn.ModuleList()
        setattr(self, "buffers", [])  # noqa: B010  # as the wrapper of Megatron has

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(x)
        return result

    def parameters(self, recurse: bool = True) -> Any:
        return iter([self.layer.weight, self.layer.bias])

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("named_parameters was called")


def batch(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n, 2), torch.randn(n, 1)


def summed(model: Net, batch: Any, rank: Any, divisor: int = 1) -> None:
    inputs, targets = (part.chunk(rank.size)[rank.index].to(rank.device) for part in batch)
    optimizer = torch.optim.SGD(model.to(rank.device).parameters(), lr=0.1)
    mse_loss(model(inputs), targets).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= divisor
    optimizer.step()


def averaged(model: Net, batch: Any, rank: Any) -> None:
    summed(model, batch, rank, rank.size)


@pytest.mark.gpus(2)
def test_replaced_methods_of_modules_are_not_called(ranks):
    options: dict[str, Any] = {"build": Net, "batch": batch, "sizes": [2], "max_examples": 1}
    assert_step_scales(ranks, averaged, **options)
    with pytest.raises(ScalingMismatch) as found:
        assert_step_scales(ranks, summed, **options)
    assert found.value.mistakes[0] == "world-size-factor"
