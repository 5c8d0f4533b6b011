"""Make the elements of constant tensors distinct in the script's process, so that the values of a slice show its place.

Biases of zeros and norms of ones have the same values everywhere. A run with distinct values finds the slices of such
tensors; its training is not compared. One device and all ranks move tensors of the same shape by the same values.
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

from mgpu_check.numerics.placement import make_distinct
from mgpu_check.torch_hooks.patches import Patches
from mgpu_check.torch_hooks.tensors import is_distributed


def install() -> None:
    """Make constant parameters and buffers distinct at registration, and whenever they are filled."""
    apart = _MovedApart()
    register_module_parameter_registration_hook(apart.registered)
    register_module_buffer_registration_hook(apart.registered)
    patches = Patches()
    for name in ("zero_", "fill_"):
        patches.wrap(torch.Tensor, name, apart.filling)


class _MovedApart:
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
        """Return whether a tensor is a parameter or buffer, or shares its memory, as `.data` does."""
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
                    # The seed depends on the shape alone: ranks may build fewer tensors than one device, or in another
                    # order.
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
        and not is_distributed(tensor)
        and tensor.is_contiguous()
    )
