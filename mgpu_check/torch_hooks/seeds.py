"""Seed all random generators that the code under test may use."""

from __future__ import annotations

import random
import sys

import torch


def seed_everything(seed: int) -> None:
    """Seed the generators of torch (CPU and GPUs), of Python, and of NumPy if it is imported."""
    # torch.manual_seed would store the seed and a stack trace for each kind of device that is not initialized.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
