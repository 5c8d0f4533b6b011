"""The model of PyTorch's tutorial on data parallelism, which shows the inputs of each replica."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


class TutorialModel(nn.Module):
    """A linear layer that records its inputs; the tutorial prints their sizes."""

    def __init__(self, input_size: int, output_size: int) -> None:
        super().__init__()
        self.fc = nn.Linear(input_size, output_size)
        # Replicas are shallow copies, so they share this list. Appending to a list is atomic among threads.
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return scores, (n, output_size), for inputs (n, input_size)."""
        self.seen.append(x)
        return self.fc(x)  # type: ignore[no-any-return]


def inputs_seen(batch: torch.Tensor, devices: Sequence[torch.device]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Run DataParallel on `batch`, (n, features).

    Return the inputs of the replicas, in device order, and the output.
    """
    model = TutorialModel(batch.shape[1], 2)
    net = nn.DataParallel(model, device_ids=list(devices)).to(devices[0])
    output = net(batch)
    return sorted(model.seen, key=lambda x: list(devices).index(x.device)), output
