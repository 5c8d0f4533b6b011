"""Choose devices by hand, as tutorials do."""

from __future__ import annotations

import torch


def try_gpu(i: int = 0) -> torch.device:
    """Return GPU number `i` if it exists, else the CPU.

    Raises:
        ValueError: `i` is negative.
    """
    if i < 0:
        raise ValueError(f"try_gpu: i={i} is not valid; devices are counted from 0")
    if i < torch.cuda.device_count():
        return torch.device("cuda", i)
    return torch.device("cpu")


def try_all_gpus() -> list[torch.device]:
    """Return all GPUs in order; without GPUs, the CPU."""
    count = torch.cuda.device_count()
    return [torch.device("cuda", i) for i in range(count)] or [torch.device("cpu")]
