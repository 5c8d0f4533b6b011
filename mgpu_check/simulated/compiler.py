"""``torch.compile`` on simulated devices: what it is given runs eagerly, as under ``TORCH_COMPILE_DISABLE=1``.

A compiler traces what a tensor does, and not the Python around it, which is where these devices are.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from mgpu_check.torch_hooks.patches import Patches

__all__ = ["install_compiler"]

_said: set[int] = set()


def _say_once() -> None:
    """Warn once in each process, and of several ranks in the first one only."""
    if os.getpid() in _said or os.environ.get("RANK", "0") != "0":
        return
    _said.add(os.getpid())
    print(
        "mgpu-check: torch.compile is left out on simulated GPUs: what it was given runs eagerly, with the same results",
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
    """Have `torch.compile`, and with it `nn.Module.compile`, give back what they are given."""
    patches.replace(torch.compile, _eager(torch.compile))
