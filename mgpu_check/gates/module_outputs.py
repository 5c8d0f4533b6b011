"""Record in a rank the output of each module of the model, with its gradient."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from mgpu_check.diagnosis.observed import RankTrace
from mgpu_check.torch_hooks.members import named_modules
from mgpu_check.torch_hooks.nested import tensors_of
from mgpu_check.torch_hooks.tensors import copied

_MOST = 1 << 16
"""Most elements of a recorded output: comparing a larger one row by row would take longer than the step."""


@contextlib.contextmanager
def noting_outputs(modules: Mapping[str, nn.Module], trace: RankTrace) -> Iterator[None]:
    """Write the first output of each module to `trace`, in the order of calls, with its gradient."""
    names = {
        id(part): prefix + name
        for prefix, module in modules.items()
        for name, part in named_modules(module)
        if prefix + name
    }

    def called(module: nn.Module, args: Any, output: Any) -> None:
        name = names.get(id(module))
        value = next(iter(tensors_of(output)), None) if name is not None else None
        if name is None or name in trace.outputs or not _is_usable(value):
            return
        assert value is not None
        trace.outputs[name] = copied(value)
        if value.requires_grad:
            value.register_hook(lambda gradient: _came_back(trace, name, gradient))

    with register_module_forward_hook(called):
        yield


def _came_back(trace: RankTrace, name: str, gradient: torch.Tensor) -> None:
    if name not in trace.gradients and _is_usable(gradient):
        trace.gradients[name] = copied(gradient)


def _is_usable(value: torch.Tensor | None) -> bool:
    return (
        value is not None
        and value.is_floating_point()
        and value.dim() > 0
        and 0 < value.numel() <= _MOST
        and not hasattr(value, "full_tensor")
    )
