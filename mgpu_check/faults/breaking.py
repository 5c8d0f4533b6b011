"""Break torch from outside: DistributedDataParallel where it is built and where it communicates, and any function."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mgpu_check.faults.registry import fault
from mgpu_check.torch_hooks.patches import replaced

__all__ = [
    "DDP",
    "communicated",
    "data_parallel_fault",
    "ddp_fault",
    "replaced_method",
    "slices",
    "upper_bits",
    "wrapped",
]

DDP = DistributedDataParallel
Plant = Callable[[], Iterator[None]]
Change = Callable[[torch.Tensor, Any, DistributedDataParallel], torch.Tensor]


def ddp_fault(summary: str, *checks: str, condition: str = "", least_gpus: int = 1) -> Callable[[Plant], Plant]:
    """Register a fault that these checks of `suite/test_distributed.py` must catch."""
    return fault("distributed", summary, caught_by=checks, condition=condition, least_gpus=least_gpus)


def data_parallel_fault(summary: str, check: str, condition: str = "") -> Callable[[Plant], Plant]:
    """Register a fault that a check of `suite/test_data_parallel.py` must catch."""
    return fault("data_parallel", summary, caught_by=(check,), condition=condition)


@contextlib.contextmanager
def wrapped(
    after: Callable[[DistributedDataParallel], None] = lambda model: None,
    before: Callable[[nn.Module], None] = lambda module: None,
    **forced: Any,
) -> Iterator[None]:
    """Have DDP with other arguments, and something done to the module before and to the wrapper after it is built."""
    real = DistributedDataParallel.__init__

    def init(self: DistributedDataParallel, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        before(module)
        real(self, module, *args, **(kwargs | forced))
        after(self)

    with replaced(DistributedDataParallel, "__init__", init):
        yield


@contextlib.contextmanager
def communicated(
    change: Change, where: Callable[[DistributedDataParallel], bool] = lambda model: True
) -> Iterator[None]:
    """Have DDP communicate a copy of each bucket that `change` has changed, for models `where` it strikes.

    Others are left alone: a model takes one communication hook only, and with one `join` divides otherwise.
    """

    def register(model: DistributedDataParallel) -> None:
        if not where(model):
            return
        group = model.process_group

        def communicate(state: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
            buffer = change(bucket.buffer().clone(), bucket, model) * (1 / group.size())
            dist.all_reduce(buffer, group=group)
            done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            done.set_result(buffer)
            return done

        # DDP compares annotations with its own types, and does not resolve those that are strings.
        communicate.__annotations__.clear()
        model.register_comm_hook(None, communicate)

    with wrapped(register):
        yield


@contextlib.contextmanager
def replaced_method(owner: Any, name: str, around: Callable[..., Any]) -> Iterator[None]:
    """Have `around` in place of a function or method: it is given the real one first, and then what that is called with."""
    real = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        return around(real, *args, **kwargs)

    with replaced(owner, name, call):
        yield


def slices(buffer: torch.Tensor, bucket: Any) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
    """Yield each parameter of a bucket with its part of `buffer`, flat."""
    at = 0
    for parameter in bucket.parameters():
        yield parameter, buffer[at : at + parameter.numel()]
        at += parameter.numel()


def upper_bits(values: torch.Tensor) -> torch.Tensor:
    """Return float32 with the upper 11 bits of each significand, as TF32 has them, by Veltkamp's splitting; others as they are."""
    if values.dtype != torch.float32:
        return values
    large = values * ((1 << 13) + 1)
    return large - (large - values)
