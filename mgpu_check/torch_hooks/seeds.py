"""One seed for all generators that code under test may draw from."""

from __future__ import annotations

import random
import sys

import torch

__all__ = ["seed_everything"]


def seed_everything(seed: int) -> None:
    """Seed the generators of torch, on the CPU and on GPUs, of Python and, where it is imported, of NumPy."""
    # Not by torch.manual_seed: for each kind of device that is not there, it keeps the seed, and the stack of the call.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
