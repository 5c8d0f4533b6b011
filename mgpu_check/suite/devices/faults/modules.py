"""Modules that lose state when they move to another device, and copies that share memory with their source."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from mgpu_check.suite.common.faults.breaking import replaced_method
from mgpu_check.suite.common.faults.operators import altered
from mgpu_check.suite.common.faults.registry import fault
from mgpu_check.torch_hooks.patches import replaced


@fault(
    "a module that moves to another device loses its gradients", "test_modules_move", condition="modules with gradients"
)
def gradients_left_behind() -> Iterator[None]:
    """The optimizer step then has no effect."""

    def apply(real: Any, module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], *rest: Any) -> Any:
        before = [(parameter, parameter.device) for parameter in module.parameters(recurse=False)]
        moved = real(module, fn, *rest)
        for parameter, device in before:
            if parameter.device != device:
                parameter.grad = None
        return moved

    with replaced_method(nn.Module, "_apply", apply):
        yield


@fault("non-persistent buffers arrive on another device as zeros", "test_modules_move", condition="persistent=False")
def unsaved_buffers_lost() -> Iterator[None]:
    """Their memory is allocated and not filled."""

    def apply(real: Any, module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], *rest: Any) -> Any:
        names = module._non_persistent_buffers_set
        before = {name: held.device for name in names if (held := module._buffers[name]) is not None}
        moved = real(module, fn, *rest)
        for name, device in before.items():
            held = module._buffers[name]
            if held is not None and held.device != device:
                module._buffers[name] = torch.zeros_like(held)
        return moved

    with replaced_method(nn.Module, "_apply", apply):
        yield


@fault(
    "to(copy=True) returns the tensor itself if dtype and device match",
    "test_copies_have_memory_of_their_own",
    condition="copies on the same device",
)
def copies_that_are_none() -> Iterator[None]:
    """A snapshot of one step changes with the next."""

    def instead(to: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return to(x, *args, **{**kwargs, "copy": False})

    with altered(torch.Tensor, "to", lambda x, *_, **kwargs: x.is_cuda and bool(kwargs.get("copy")), instead):
        yield


@fault(
    "flatten copies contiguous tensors instead of returning a view",
    "test_copies_have_memory_of_their_own",
    condition="contiguous tensors on a device",
)
def views_that_are_copies() -> Iterator[None]:
    """Writes to the result do not reach the source."""
    flatten = torch.Tensor.flatten
    with replaced(
        torch.Tensor, "flatten", lambda x, *args: flatten(x, *args).clone() if x.is_cuda else flatten(x, *args)
    ):
        yield


@fault(
    "a packed sequence on another device is unsorted with the sorting permutation",
    "test_layers_and_gradients",
    condition="enforce_sorted=False, an order that sorting twice does not restore",
)
def packed_sequence_not_unsorted() -> Iterator[None]:
    """Final states belong to other samples."""

    def to(real: Any, self: PackedSequence, *args: Any, **kwargs: Any) -> PackedSequence:
        moved: PackedSequence = real(self, *args, **kwargs)
        if moved is self or moved.sorted_indices is None:
            return moved
        return PackedSequence(moved.data, moved.batch_sizes, moved.sorted_indices, moved.sorted_indices)

    with replaced_method(PackedSequence, "to", to):
        yield
