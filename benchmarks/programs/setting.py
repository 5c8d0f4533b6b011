"""The form of a right program, the table of all, and how a fault is planted in one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


@dataclass(frozen=True)
class Program:
    """The arguments of `assert_step_scales`.

    Attributes:
        divisible: batch sizes are multiples of the world size only.
        least: samples on each rank at least, where `divisible`.
        narrow: it computes in float16 or bfloat16, where a flipped bit of float32 drowns.
        observes_gradients: a gradient of each rank goes into its results.
    """

    step: Any
    build: Callable[[], Any]
    batch: Callable[[int], Any]
    reference: Callable[..., Any] | None = None
    divisible: bool = False
    least: int = 1
    narrow: bool = False
    single_process: bool = False
    observes_gradients: bool = True


PROGRAMS: dict[str, Program] = {}

after_placing: Callable[[nn.Module, Any], None] | None = None
"""Called in a rank with each model when it has come to its device, and the rank: to plant something there."""


def program(build: Callable[[], Any], batch: Callable[[int], Any], **options: Any) -> Callable[[Any], Any]:
    def register(step: Any) -> Any:
        PROGRAMS[step.__name__] = Program(step, build, batch, **options)
        return step

    return register


def placed(model: nn.Module, rank: Any) -> nn.Module:
    model.to(rank.device)
    if after_placing is not None:
        after_placing(model, rank)
    return model


def shard(batch: Any, rank: Any) -> list[torch.Tensor]:
    return [part[rank.index :: rank.size].to(rank.device) for part in batch]


def averaged(model: nn.Module, size: int) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= size


@contextlib.contextmanager
def planting(plant: Callable[[nn.Module, Any], None]) -> Iterator[None]:
    """Call `plant` with each model that comes to its device in the meantime."""
    global after_placing
    after_placing = plant
    try:
        yield
    finally:
        after_placing = None
