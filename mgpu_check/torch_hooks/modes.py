"""Leave torch modes that a test entered and did not leave: autocast, inference mode, dispatch modes, flushed
denormals."""

from __future__ import annotations

import sys
from typing import Any

import torch

_DEVICE_TYPES = ("cpu", "cuda")
_core: Any = torch._C  # most of it is not in the stubs
_SMALLEST = sys.float_info.min


class Modes:
    """The modes of torch in a fresh rank, which `restore` restores."""

    def __init__(self) -> None:
        self._autocast = _autocast()
        self._functions: int = _core._len_torch_function_stack()
        self._dispatches: int = _core._len_torch_dispatch_stack()
        self._guards: list[Any] = []

    def restore(self) -> None:
        """Leave the modes that were entered since the start."""
        if torch.is_inference_mode_enabled():
            # Only the guard that entered the mode can leave it. A nested guard with False has the same effect.
            guard = _core._InferenceMode(False)
            guard.__enter__()
            self._guards.append(guard)
        while _core._len_torch_function_stack() > self._functions:
            _core._pop_torch_function_stack()
        while _core._len_torch_dispatch_stack() > self._dispatches:
            _core._pop_torch_dispatch_stack(None)
        while _saved_tensors_hooks():
            _core._autograd._pop_saved_tensors_default_hooks()
        if _autocast() != self._autocast:
            cache, *devices = self._autocast
            torch.set_autocast_cache_enabled(cache)
            for device_type, (enabled, dtype) in zip(_DEVICE_TYPES, devices, strict=True):
                torch.set_autocast_enabled(device_type, enabled)
                torch.set_autocast_dtype(device_type, dtype)
            torch.clear_autocast_cache()
        if _SMALLEST / 2 == 0.0:
            torch.set_flush_denormal(False)


def _autocast() -> tuple[Any, ...]:
    return torch.is_autocast_cache_enabled(), *(
        (torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)) for device_type in _DEVICE_TYPES
    )


def _saved_tensors_hooks() -> bool:
    top = getattr(_core._autograd, "_top_saved_tensors_default_hooks", None)
    return top is not None and top(True) is not None
