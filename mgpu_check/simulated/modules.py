"""Adapt what modules and optimizers do differently per device: conversion, grouping of parameters, lazy parameters."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from mgpu_check.simulated.lazy import TARGET
from mgpu_check.simulated.state import untraced_device
from mgpu_check.simulated.tensor import SimulatedTensor
from mgpu_check.torch_hooks.patches import Patches

__all__ = ["install_modules"]

_OWN = ("_dev", "_is_param", TARGET)  # what a simulated or lazy tensor says of itself
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")

Groups = dict[tuple[torch.device, torch.dtype | None], tuple[list[list[torch.Tensor | None]], list[int]]]


def _group(original: Callable[..., Groups]) -> Callable[..., Groups]:
    """Group lists of tensors by device and dtype; C++ sees the backing device only."""

    def group(tensorlistlist: Sequence[Sequence[torch.Tensor | None]], with_indices: bool = False) -> Groups:
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

    return group


def _parse_to(original: Callable[..., object]) -> Callable[..., object]:
    """Parse the arguments of ``Module.to``: an int is a CUDA device, whatever accelerator this build of torch knows."""

    def parse(*args: object, **kwargs: object) -> object:
        if args and isinstance(args[0], int) and not isinstance(args[0], bool):
            args = (untraced_device(args[0]), *args[1:])
        elif isinstance(kwargs.get("device"), int):
            kwargs["device"] = untraced_device(kwargs["device"])
        return original(*args, **kwargs)

    return parse


def _apply(original: Callable[..., torch.nn.Module]) -> Callable[..., torch.nn.Module]:
    """Make ``Module._apply`` swap, which keeps parameters simulated and the same objects.

    Where a live graph holds a parameter torch cannot swap it: a new one takes its place, where on a device the old one
    would keep its identity. ``load_state_dict`` is not to swap, so the flags of torch are set for the call alone. What
    others have put on a parameter stays there, and its hooks do: torch swaps them, too, where it moves the data only.
    """

    def moved(module: torch.nn.Module, fn: object, recurse: bool) -> torch.nn.Module:
        before = {name: _Extras(param) for name, param in module._parameters.items() if param is not None}
        try:
            return original(module, fn, recurse)
        finally:
            for name, extras in before.items():
                extras.put(module._parameters[name])

    @functools.wraps(original)
    def apply(self: torch.nn.Module, fn: object, recurse: bool = True) -> torch.nn.Module:
        try:
            with _conversion(swap=True, overwrite=False):
                return moved(self, fn, recurse)
        except RuntimeError as error:
            if "Couldn't swap" not in str(error):
                raise
        with _conversion(swap=False, overwrite=True):
            return moved(self, fn, recurse)

    return apply


class _Extras:
    """The attributes of a parameter besides its data."""

    def __init__(self, param: Any) -> None:
        self.attributes = dict(param.__dict__)
        self.hooks = {name: hooks for name in _HOOKS if (hooks := getattr(param, name)) is not None}

    def put(self, param: Any) -> None:
        for key, value in self.attributes.items():
            if key not in _OWN:
                param.__dict__.setdefault(key, value)
        for name, hooks in self.hooks.items():
            setattr(param, name, hooks)  # also where Python has them still: what was swapped is what C++ has


@contextmanager
def _conversion(*, swap: bool, overwrite: bool) -> Iterator[None]:
    future = torch.__future__
    was = future.get_swap_module_params_on_conversion(), future.get_overwrite_module_params_on_conversion()
    future.set_swap_module_params_on_conversion(swap)
    future.set_overwrite_module_params_on_conversion(overwrite)
    try:
        yield
    finally:
        future.set_swap_module_params_on_conversion(was[0])
        future.set_overwrite_module_params_on_conversion(was[1])


def install_modules(patches: Patches) -> None:
    """Let ``Module.to`` keep simulated tensors, and ``foreach``/``fused`` optimizers take them."""
    patches.set(
        torch._C,
        "_group_tensors_by_device_and_dtype",
        _group(torch._C._group_tensors_by_device_and_dtype),  # type: ignore[arg-type]
    )
    patches.wrap(torch.nn.Module, "_apply", _apply)
    patches.wrap(torch._C._nn, "_parse_to", _parse_to)
    for name in ("torch.utils._foreach_utils", "torch.optim.optimizer"):
        module = importlib.import_module(name)  # torch.optim hides the name of its submodule
        patches.set(module, "_foreach_supported_types", [*module._foreach_supported_types, SimulatedTensor])
