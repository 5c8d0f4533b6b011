"""A gate reads models whose authors have replaced or overridden the methods that list what a module holds."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

from tests.gates.steps import chunked, passes, refuted, regression


class Shadowing(nn.Linear):
    modules = buffers = named_buffers = state_dict = None

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("named_modules was called")

    def __bool__(self) -> bool:
        raise RuntimeError("the truth value was asked for")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.extra = Shadowing(6, 3), nn.ModuleList()
        setattr(self, "buffers", [])  # noqa: B010  # as the wrapper of Megatron has

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(x)
        return result

    def parameters(self, recurse: bool = True) -> Any:
        return iter([self.layer.weight, self.layer.bias])

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("named_parameters was called")


def summed(model: Net, batch: Any, rank: Any, averaged: bool = False) -> None:
    inputs, targets = chunked(batch, rank)
    optimizer = torch.optim.SGD(model.to(rank.device).parameters(), lr=0.1)
    mse_loss(model(inputs), targets).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= rank.size if averaged else 1
    optimizer.step()


@pytest.mark.slow
@pytest.mark.gpus(2)
def test_replaced_methods_of_modules_are_not_called(ranks):
    options: dict[str, Any] = {"build": Net, "batch": regression, "sizes": [2], "max_examples": 1}
    passes(ranks, functools.partial(summed, averaged=True), **options)
    refuted(ranks, summed, "world-size-factor", **options)
