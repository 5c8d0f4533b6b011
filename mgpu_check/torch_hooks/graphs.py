"""Captures of CUDA graphs, during which hooks must not ask a device for values."""

from __future__ import annotations

import torch


def is_capturing() -> bool:
    """Return whether the current stream captures. No device is initialized to find out."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
