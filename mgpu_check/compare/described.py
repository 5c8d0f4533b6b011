"""Describe a model that the script trains, for the trace."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import torch
from torch import nn

from mgpu_check.compare.naming import unwrapped
from mgpu_check.processes.collective_records import relative
from mgpu_check.torch_hooks.nested import named_buffers, named_modules, named_parameters
from mgpu_check.torch_hooks.tensors import is_distributed, name_of


def in_training(module: nn.Module) -> bool:
    """Return whether a model is in training mode: its wrapper may have another mode, as that of Lightning."""
    return unwrapped(module).training


def described(module: nn.Module) -> dict[str, Any]:
    """Return the class of a model, its wrapper, and its layers that use batch statistics or dropout."""
    model = unwrapped(module)
    wrapper = type(module).__name__ if model is not module else None
    return {
        "model": type(model).__name__,
        "wrapper": wrapper,
        "replicas": len(vars(module).get("device_ids") or ()) if wrapper == "DataParallel" else 1,
        "broadcasts": wrapper == "DistributedDataParallel" and bool(getattr(module, "broadcast_buffers", False)),
        "batch_norms": sorted({type(m).__name__ for _, m in named_modules(model) if _takes_batch_statistics(m)}),
        "dropouts": sorted({told for _, m in named_modules(model) if (told := _dropout(m))}),
    }


def has_state(module: nn.Module) -> bool:
    """Return whether a module has parameters or buffers: transformations of data and losses have neither."""
    return next(itertools.chain(named_parameters(module), named_buffers(module)), None) is not None


def narrowed(module: nn.Module, output: Any) -> dict[str, str]:
    """Return the dtype of an output that is narrower than float32, and the class of its module; else nothing."""
    plain = isinstance(output, torch.Tensor) and output.is_floating_point() and not is_distributed(output)
    if not plain or output.element_size() >= 4:
        return {}
    return {"dtype": name_of(output.dtype), "module": type(module).__name__}


def forward_of(module: nn.Module) -> dict[str, str]:
    """Return the name and the line of a model's forward method."""
    kind = type(unwrapped(module))
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    line = f"{relative(code.co_filename)}:{code.co_firstlineno}" if code else "of no file"
    return {"what": f"{kind.__name__}.forward", "line": line}


def _dropout(module: nn.Module) -> str:
    name, p = type(module).__name__, vars(module).get("p")
    return f"{name}(p={p:g})" if "Dropout" in name and isinstance(p, (int, float)) and p else ""


def _takes_batch_statistics(module: nn.Module) -> bool:
    name = type(module).__name__
    return "BatchNorm" in name and name != "SyncBatchNorm" and module.training
