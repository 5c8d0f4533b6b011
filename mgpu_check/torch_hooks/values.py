"""Read the values of tensors of all classes, without the methods that users override."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.nn.parameter import is_lazy

DTENSOR = "torch.distributed.tensor"
_FUNCTIONAL = "torch.distributed._functional_collectives"
PACKAGES = ("torch", "mgpu_check")  # packages whose classes keep the values of a tensor in its memory
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_base: Any = torch._C.TensorBase


def is_distributed(value: object) -> bool:
    """Return whether a value is a DTensor, without importing DTensor."""
    return _is(value, DTENSOR, "DTensor")


def is_pending(value: object) -> bool:
    """Return whether a value is the result of a functional collective, which waits for it when it is used."""
    return _is(value, _FUNCTIONAL, "AsyncCollectiveTensor")


def _is(value: object, module: str, name: str) -> bool:
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(value, kind)


def readable(tensor: Any) -> torch.Tensor | None:
    """Return a dense tensor with the same values, without autograd history; None if the values cannot be read.

    A pending result is waited for, and a sparse or quantized tensor converted. A DTensor stays one. Tensors without
    values of their own are None: of `torch.func`, fake, on "meta", lazy, nested, freed, or in an unknown wrapper.
    """
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    if type(tensor) in _PLAIN and not wrapped and tensor.layout is torch.strided:
        plain: torch.Tensor = tensor.detach()
        if plain.data_ptr() and not (plain.is_quantized or plain.is_nested):
            return plain  # first, because each tensor of each step is read
    if is_pending(tensor):
        return readable(tensor.trigger_wait())
    with torch._C.DisableTorchFunctionSubclass():
        if wrapped or is_lazy(tensor) or _base.is_meta.__get__(tensor) or _base.is_nested.__get__(tensor):
            return None
        if is_distributed(tensor):
            distributed: torch.Tensor = _base.detach(tensor)
            return distributed
        if type(tensor).__module__.partition(".")[0] not in PACKAGES:
            with torch._C._DisableTorchDispatch():
                tensor = torch.Tensor._make_subclass(torch.Tensor, tensor)
        value: torch.Tensor = _base.detach(tensor)
        if value.layout is not torch.strided:
            value = value.to_dense()
        elif value.is_quantized:
            value = value.dequantize()
        return value if _base.data_ptr(value) or not value.numel() else None
