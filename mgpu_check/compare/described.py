"""Describe a model that the script trains, for the trace."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import torch
from torch import nn

from mgpu_check.compare.naming import unwrapped
from mgpu_check.processes.record import relative
from mgpu_check.torch_hooks.tensors import name_of


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
        "replicas": len(getattr(module, "device_ids", ()) or ()) if wrapper == "DataParallel" else 1,
        "batch_norms": sorted({type(m).__name__ for m in model.modules() if _takes_batch_statistics(m)}),
        "dropouts": sorted({str(m) for m in model.modules() if getattr(m, "p", 0) and "Dropout" in type(m).__name__}),
    }


def has_state(module: nn.Module) -> bool:
    """Return whether a module has parameters or buffers: transformations of data and losses have neither."""
    return next(itertools.chain(module.parameters(), module.buffers()), None) is not None


def narrowed(module: nn.Module, output: Any) -> dict[str, str]:
    """Return the dtype of an output that is narrower than float32, and the class of its module; else nothing."""
    plain = isinstance(output, torch.Tensor) and output.is_floating_point() and not hasattr(output, "full_tensor")
    if not plain or output.element_size() >= 4:
        return {}
    return {"dtype": name_of(output.dtype), "module": type(module).__name__}


def forward_of(module: nn.Module) -> dict[str, str]:
    """Return the name and the line of a model's forward method."""
    kind = type(unwrapped(module))
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    line = f"{relative(code.co_filename)}:{code.co_firstlineno}" if code else "of no file"
    return {"what": f"{kind.__name__}.forward", "line": line}


def _takes_batch_statistics(module: nn.Module) -> bool:
    name = type(module).__name__
    return "BatchNorm" in name and name != "SyncBatchNorm" and module.training
