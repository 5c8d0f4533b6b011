"""Restrict torch's profilers to the host in a simulation: no driver measures the time of simulated devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.autograd.profiler as profiler
import torch.autograd.profiler_legacy as legacy
from torch._C._profiler import ProfilerActivity, ProfilerState

from mgpu_check.torch_hooks.patches import Patches, around


@around
def _host_only(original: Callable[..., None], self: Any, *args: object, **kwargs: object) -> None:
    original(self, *args, **kwargs)
    if getattr(self, "profiler_kind", None) is ProfilerState.KINETO_GPU_FALLBACK:
        self.profiler_kind = ProfilerState.KINETO
    if hasattr(self, "kineto_activities"):
        self.kineto_activities.discard(ProfilerActivity.CUDA)


@around
def _without_devices(original: Callable[..., None], self: Any, *args: object, **kwargs: object) -> None:
    original(self, *args, **kwargs)
    self.use_cuda = False


def _no_ranges(self: profiler.emit_nvtx) -> profiler.emit_nvtx:
    """Do nothing in ``with emit_nvtx()``: no tool could record the ranges."""
    return self


def install_profiling(patches: Patches) -> None:
    patches.wrap(profiler.profile, "__init__", _host_only)
    patches.wrap(legacy.profile, "__init__", _without_devices)
    patches.set(profiler.emit_nvtx, "__enter__", _no_ranges)
    patches.set(profiler.emit_nvtx, "__exit__", lambda self, *_: None)
