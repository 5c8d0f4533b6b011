"""Adapt modules and optimizers to simulated devices: conversion of modules, and grouping of tensors by device."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence

import torch

from mgpu_check.simulated.identity import put_grad
from mgpu_check.simulated.state import untraced_device
from mgpu_check.simulated.tensor import SimulatedTensor
from mgpu_check.torch_hooks.patches import Patches, around

Groups = dict[tuple[torch.device, torch.dtype | None], tuple[list[list[torch.Tensor | None]], list[int]]]


@around
def _group(
    original: Callable[..., Groups], tensorlistlist: Sequence[Sequence[torch.Tensor | None]], with_indices: bool = False
) -> Groups:
    """Group lists of tensors by simulated device and dtype; C++ would group by the backing device."""
    if not any(isinstance(t, SimulatedTensor) for row in tensorlistlist for t in row):
        return original(tensorlistlist, with_indices)
    groups: Groups = {}
    for i, leading in enumerate(tensorlistlist[0]):
        if leading is None:
            continue
        key = (leading.device, leading.dtype)
        lists, indices = groups.setdefault(key, ([[] for _ in tensorlistlist], []))
        for column, row in zip(lists, tensorlistlist, strict=True):
            if row:
                column.append(row[i])
        if with_indices:
            indices.append(i)
    return groups


@around
def _parse_to(original: Callable[..., object], *args: object, **kwargs: object) -> object:
    """Parse the arguments of ``Module.to``, where an int means a CUDA device on every build of torch."""
    if args and isinstance(args[0], int) and not isinstance(args[0], bool):
        args = (untraced_device(args[0]), *args[1:])
    elif isinstance(kwargs.get("device"), int):
        kwargs["device"] = untraced_device(kwargs["device"])
    return original(*args, **kwargs)


@around
def _apply(
    original: Callable[..., torch.nn.Module], self: torch.nn.Module, fn: object, recurse: bool = True
) -> torch.nn.Module:
    """Make ``Module._apply`` move gradients: put each back, because C++ still refers to the data that it had before."""
    held = [(p, grad) for p in self._parameters.values() if p is not None and (grad := p.grad) is not None]
    try:
        return original(self, fn, recurse)
    finally:
        for param, grad in held:
            if param.grad is not grad:
                put_grad(param, grad)


def install_modules(patches: Patches) -> None:
    patches.set(
        torch._C,
        "_group_tensors_by_device_and_dtype",
        _group(torch._C._group_tensors_by_device_and_dtype),
    )
    patches.wrap(torch.nn.Module, "_apply", _apply)
    patches.wrap(torch._C._nn, "_parse_to", _parse_to)
    for name in ("torch.utils._foreach_utils", "torch.optim.optimizer"):
        module = importlib.import_module(name)  # torch.optim hides the name of its submodule
        patches.set(module, "_foreach_supported_types", [*module._foreach_supported_types, SimulatedTensor])
