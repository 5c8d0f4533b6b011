"""Make the elements of constant tensors distinct in the script's process, so that a slice of them shows where it is from.

Biases of zeros and norms of ones have the same values everywhere. A run whose constants are moved apart finds their slices;
what it trains is compared with nothing. One device and ranks move a tensor of one shape by the same values.
"""

from __future__ import annotations

import functools
import math
import weakref
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)

from mgpu_check.numerics.placement.distinct import make_distinct
from mgpu_check.torch_hooks.patches import Patches

__all__ = ["install"]


def install() -> None:
    """Move parameters and buffers that are constant, when a module gets them and whenever they are filled."""
    apart = _Apart()
    register_module_parameter_registration_hook(apart.registered)
    register_module_buffer_registration_hook(apart.registered)
    patches = Patches()
    for name in ("zero_", "fill_"):
        patches.wrap(torch.Tensor, name, apart.filling)


class _Apart:
    def __init__(self) -> None:
        self._known: list[weakref.ref[torch.Tensor]] = []
        self._shapes: set[torch.Size] = set()
        self._within = False

    def registered(self, module: nn.Module, name: str, tensor: Any) -> None:
        if isinstance(tensor, torch.Tensor) and _is_movable(tensor):
            self._known.append(weakref.ref(tensor))
            self._shapes.add(tensor.shape)
            self._move(tensor)

    def filling(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def fill(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            result = original(tensor, *args, **kwargs)
            if not self._within and tensor.shape in self._shapes and _is_movable(tensor) and self._is_known(tensor):
                self._move(tensor)
            return result

        return fill

    def _is_known(self, tensor: torch.Tensor) -> bool:
        """Return whether it is a parameter or buffer, or has the memory of one, as its `data` has."""
        address = tensor.data_ptr()
        live = [known for reference in self._known if (known := reference()) is not None]
        return any(
            known is tensor or (known.shape == tensor.shape and known.data_ptr() == address != 0) for known in live
        )

    def _move(self, tensor: torch.Tensor) -> None:
        self._within = True
        try:
            with torch.no_grad():
                first = tensor.reshape(-1)[0]
                if math.isfinite(float(first)) and bool((tensor == first).all()):
                    # By its shape alone: ranks may build fewer tensors than one device, and in another order.
                    seed = zlib.crc32(repr(tuple(tensor.shape)).encode())
                    make_distinct(tensor, abs(float(first)), torch.Generator("cpu").manual_seed(seed))
        finally:
            self._within = False


def _is_movable(tensor: torch.Tensor) -> bool:
    return (
        tensor.is_floating_point()
        and tensor.numel() > 1
        and tensor.layout is torch.strided
        and not tensor.is_meta
        and not hasattr(tensor, "full_tensor")
        and tensor.is_contiguous()
    )
