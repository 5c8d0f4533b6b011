"""Plant faults of DataParallel: change tensors that it copies, adds up and gathers, its replicas and their hooks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, comm

from mgpu_check.suite.common.faults.breaking import around, given, returned
from mgpu_check.suite.common.faults.registry import Planter
from mgpu_check.suite.common.faults.when import When

MANY = 1 << 16

ONE_DEVICE = When("one device", lambda *args: True)
"""The last device, which `copied` and `copied_together` select."""

data_parallel_module = sys.modules["torch.nn.parallel.data_parallel"]
"""The module. The package attribute of this name is the function `data_parallel`."""

Context = AbstractContextManager[None]


def mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Change each tensor of a nested value. If `change` returns NotImplemented, the tensor stays."""
    if isinstance(value, torch.Tensor):
        made = change(value)
        return value if made is NotImplemented else made
    if isinstance(value, dict):
        return {key: mapped(part, change) for key, part in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(mapped(part, change) for part in value)
    return value


def gathered(change: Callable[[torch.Tensor], torch.Tensor]) -> Context:
    """Plant a change of each tensor that DataParallel has gathered."""
    return returned(DataParallel, "gather")(lambda outputs, *args: mapped(outputs, change))


def copied_together(change: Callable[[list[torch.Tensor]], list[torch.Tensor]]) -> Context:
    """Plant a change of the tensors that the last of several devices receives in one call."""

    def broadcast(outputs: Any, *args: Any) -> Any:
        *others, last = map(list, outputs)
        with torch.no_grad():
            made = change(last) if others else NotImplemented
        return [*others, last if made is NotImplemented else made]

    return returned(comm, "broadcast_coalesced")(broadcast)


def copied(change: Callable[[torch.Tensor], torch.Tensor]) -> Context:
    """Plant a change of each tensor that the last of several devices receives."""
    return copied_together(lambda tensors: mapped(tensors, change))


def added(change: Callable[[list[list[torch.Tensor]]], list[list[torch.Tensor]]]) -> Context:
    """Plant a change of the gradients of several devices, a list for each, before they are added up."""

    def reduce(inputs: Any, *args: Any) -> Any:
        made = change([list(held) for held in inputs])
        return None if made is NotImplemented else (made,)

    return given(comm, "reduce_add_coalesced")(reduce)


def replica_parts(change: Callable[[nn.Module, nn.Module], object]) -> Context:
    """Plant a change of each module of each replica except the first; it gets the replica and the module."""

    def replicate(replicas: list[nn.Module], *args: Any) -> None:
        for replica in replicas[1:]:
            for part in replica.modules():
                change(replica, part)

    return returned(data_parallel_module, "replicate")(replicate)


def hooks_of_replicas(register: str) -> Planter:
    """Plant a change of what hooks with keyword arguments return on replicas.

    It gets the arguments of the hook without the module, and the result.
    """

    def plant(change: Callable[[tuple[Any, ...], Any], Any]) -> Context:
        def registered(real: Any, self: nn.Module, hook: Any, *, with_kwargs: bool = False, **options: Any) -> Any:
            def called(module: nn.Module, *given: Any) -> Any:
                made = hook(module, *given)
                return change(given, made) if getattr(module, "_is_replica", False) else made

            return real(self, called if with_kwargs else hook, with_kwargs=with_kwargs, **options)

        return around(nn.Module, register)(registered)

    return plant
