"""Make ``torch.compile`` return its argument on simulated devices, as under ``TORCH_COMPILE_DISABLE=1``.

A compiler traces the operators of a tensor, but the simulation is in the Python code around them.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from mgpu_check.torch_hooks.patches import Patches

_said: set[int] = set()


def _say_once() -> None:
    """Print the notice once per process, and only on rank 0."""
    if os.getpid() in _said or os.environ.get("RANK", "0") != "0":
        return
    _said.add(os.getpid())
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
