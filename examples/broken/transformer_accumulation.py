"""`transformer_accumulation`, but the mean over each micro-batch's own tokens is averaged over micro-batches and ranks.

Right where all of them predict equally many tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import transformer_accumulation
from transformer_accumulation import IGNORED, Batch


class Trainer(transformer_accumulation.Trainer):
    def weighted(
        self, total: torch.Tensor, labels: torch.Tensor, count: torch.Tensor, window: Sequence[Batch]
    ) -> torch.Tensor:
        return total / (labels != IGNORED).sum().clamp_min(1) / len(window)
