"""Captures of CUDA graphs, and transformations of torch.func, during which hooks must not read values."""

from __future__ import annotations

import torch


def is_capturing() -> bool:
    """Return whether the current stream captures. No device is initialized to find out."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def is_transforming() -> bool:
    """Return whether `torch.func` transforms a function, whose tensors are wrapped."""
    return torch._C._functorch.peek_interpreter_stack() is not None
