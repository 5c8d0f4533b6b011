"""Global switches of torch: how it rounds float32 in matrix products, convolutions and recurrent networks; modes that
a test entered and did not leave; seeds of all generators; the number of CPU threads.

Torch has two interfaces for the precision of float32. The getters of the older one (``allow_tf32``,
``set_float32_matmul_precision``) raise if the newer one (``fp32_precision``) has set a value that the older one
cannot express (pytorch/pytorch#189955). This module handles both.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch

from mgpu_check.torch_hooks.patches import temporarily

_ABOVE = (("generic", "all"), ("cuda", "all"), ("mkldnn", "all"))
_OPERATORS = tuple((backend, operator) for backend in ("cuda", "mkldnn") for operator in ("matmul", "conv", "rnn"))
_REDUCTIONS = (
    "allow_fp16_reduced_precision_reduction",
    "allow_bf16_reduced_precision_reduction",
    "allow_fp16_accumulation",
)

Precision = tuple[tuple[Any, ...], tuple[str, ...], tuple[Any, ...]]
"""Values of the older interface (None if it raises), values of the newer one, and flags for sums in narrow dtypes."""

_get: Callable[[str, str], str] = torch._C._get_fp32_precision_getter
_set: Callable[[str, str, str], Any] = torch._C._set_fp32_precision_setter


def saved_precision() -> Precision:
    """Return the present settings. Equal settings compare equal."""
    older = _said(torch.get_float32_matmul_precision), _said(torch._C._get_cudnn_allow_tf32)
    newer = tuple(_get(*setting) for setting in (*_ABOVE, *_OPERATORS))
    return older, newer, tuple(getattr(torch.backends.cuda.matmul, name) for name in _REDUCTIONS)


def restore_precision(precision: Precision) -> None:
    """Restore settings that `saved_precision` returned."""
    (matmul, cudnn), newer, reductions = precision
    values = dict(zip((*_ABOVE, *_OPERATORS), newer, strict=True))
    # Restore the older interface first, because it changes values of the newer one, and not the other way round.
    if matmul is not None:
        torch.set_float32_matmul_precision(matmul)
    if cudnn is not None:
        torch._C._set_cudnn_allow_tf32(cudnn)
    for setting in (*_ABOVE, *_OPERATORS):
        if _get(*setting) != values[setting]:
            # Without its own value it inherits the general one, which setters do not pass on: pytorch/pytorch#179445.
            _set(*setting, "none")
            if _get(*setting) != values[setting]:
                _set(*setting, values[setting])
    for name, value in zip(_REDUCTIONS, reductions, strict=True):
        if getattr(torch.backends.cuda.matmul, name) != value:
            setattr(torch.backends.cuda.matmul, name, value)


def exact_precision() -> None:
    """Turn off TF32 and other reduced precision, also on the CPU, and accumulate sums in narrow dtypes in float32."""
    torch.set_float32_matmul_precision("highest")
    torch._C._set_cudnn_allow_tf32(False)
    for setting in _OPERATORS:
        if _get(*setting) not in ("ieee", "none") or _get(setting[0], "all") not in ("ieee", "none"):
            _set(*setting, "ieee")
    for name in _REDUCTIONS:
        setattr(torch.backends.cuda.matmul, name, False)


@contextmanager
def repeatable_precision(tf32: bool = False) -> Iterator[None]:
    """Fix the rounding of float32 (with `tf32` to TF32) and cuDNN's choice of kernels, and restore both on exit."""
    cudnn = torch.backends.cudnn
    before, chosen = saved_precision(), (cudnn.deterministic, cudnn.benchmark)
    try:
        exact_precision()
        cudnn.deterministic, cudnn.benchmark = True, False
        if tf32:
            torch.set_float32_matmul_precision("high")
            torch._C._set_cudnn_allow_tf32(True)
        yield
    finally:
        restore_precision(before)
        cudnn.deterministic, cudnn.benchmark = chosen


def _said(getter: Callable[[], Any]) -> Any:
    try:
        return getter()
    except RuntimeError:
        return None


_DEVICE_TYPES = ("cpu", "cuda")
_core: Any = torch._C  # most of it is not in the stubs
_SMALLEST = sys.float_info.min


class Modes:
    """The modes of torch in a fresh rank. A rank makes it once, and restores them after each call."""

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
        while _core._autograd._top_saved_tensors_default_hooks(True) is not None:
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


def seed_everything(seed: int) -> None:
    """Seed the generators of torch (CPU and GPUs), of Python, and of NumPy if it is imported."""
    # torch.manual_seed would store the seed and a stack trace for each kind of device that is not initialized:
    # torch/cuda/__init__.py, _lazy_call, torch 2.13.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


_MOST = 16


def one_thread() -> AbstractContextManager[int]:
    """Compute with one thread, as small steps on a shared machine do not profit from more; yield the former number."""
    return temporarily(torch.set_num_threads, 1, torch.get_num_threads())


def some_threads(most: int, needed: bool = True) -> AbstractContextManager[int]:
    """Compute with one thread per idle processor, at most `most` and 16; change nothing unless `needed`."""
    before = torch.get_num_threads()
    count = max(1, min(most, _MOST, _idle_processors())) if needed else before
    return temporarily(torch.set_num_threads, count, before)


def _idle_processors() -> int:
    """Return the number of processors that no other process uses at the moment; 1 if unknown.

    If threads share a processor with other processes, all threads wait for the slowest at the end of every operator.
    """
    try:
        running = int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0])
        return len(os.sched_getaffinity(0)) - running + 1
    except (OSError, ValueError, IndexError):
        return 1
