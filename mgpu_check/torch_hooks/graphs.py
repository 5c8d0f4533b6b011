"""Whether a CUDA graph is being captured: then nobody may ask a device for values, as hooks do that record them."""

from __future__ import annotations

import torch

__all__ = ["is_capturing"]


def is_capturing() -> bool:
    """Return whether the current stream captures. No device is initialized to find out."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
