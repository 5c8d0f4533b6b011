"""Replace torch's compilers on a simulated node, and restrict its profilers to the host: no driver measures the time
of simulated devices.

``torch.compile`` returns its argument, as under ``TORCH_COMPILE_DISABLE=1``: a compiler traces the operators of a
tensor, but the simulation is in the Python code around them.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.autograd.profiler as profiler
import torch.autograd.profiler_legacy as legacy
import torch.jit._builtins
from torch._C._profiler import ProfilerActivity, ProfilerState

from mgpu_check.torch_hooks.patches import Patches, around

_warned: set[int] = set()


def _say_once() -> None:
    """Print the notice once per process, and only on rank 0."""
    if os.getpid() in _warned or os.environ.get("RANK", "0") != "0":
        return
    _warned.add(os.getpid())
    print(
        "mgpu-check: torch.compile has no effect on simulated GPUs: the code runs eagerly, with the same results",
        file=sys.stderr,
        flush=True,
    )


def _eager(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def compile(model: Callable[..., Any] | None = None, **options: Any) -> Any:
        if model is None:
            return lambda function: compile(function, **options)
        if not options.get("disable"):
            _say_once()
        return model

    return compile


def install_compiler(patches: Patches) -> None:
    patches.replace(torch.compile, _eager(torch.compile))


def install_scripting(patches: Patches) -> None:
    """Allow scripts to call the replacements, which `torch.jit.script` knows by their ids. Install this last."""
    table: dict[int, str] = torch.jit._builtins._get_builtin_table()
    added = {id(new): table[old] for old, new in patches.replaced() if old in table}

    def forget() -> None:
        for key in added:
            table.pop(key, None)

    table.update(added)
    patches.at_exit(forget)


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


def install_profiling(patches: Patches) -> None:
    patches.wrap(profiler.profile, "__init__", _host_only)
    patches.wrap(legacy.profile, "__init__", _without_devices)
    # `with emit_nvtx()` does nothing: no tool could record the ranges.
    patches.set(profiler.emit_nvtx, "__enter__", lambda self: self)
    patches.set(profiler.emit_nvtx, "__exit__", lambda self, *_: None)
