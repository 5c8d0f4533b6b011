"""The generators that code draws random numbers from without being told to: in a rank."""

from __future__ import annotations

import random
import sys

import torch

__all__ = ["seed_all"]


def seed_all(seed: int) -> None:
    """Seed the default generators of torch (all devices), of Python, and of NumPy where it is imported."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
