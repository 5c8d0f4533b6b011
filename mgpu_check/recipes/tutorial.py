"""The model of PyTorch's tutorial on data parallelism, which shows the batch that each replica is given."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

__all__ = ["TutorialModel", "inputs_seen"]


class TutorialModel(nn.Module):
    """A linear layer that notes its inputs, where the tutorial prints their sizes."""

    def __init__(self, input_size: int, output_size: int) -> None:
        super().__init__()
        self.fc = nn.Linear(input_size, output_size)
        # Replicas are shallow copies, so all of them share this list; appending is atomic among their threads.
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return scores, (n, output_size), of inputs (n, input_size)."""
        self.seen.append(x)
        return self.fc(x)  # type: ignore[no-any-return]


def inputs_seen(batch: torch.Tensor, devices: Sequence[torch.device]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return what the replicas on `devices` get of `batch`, (n, features), in the order of devices, and the joint
    output.
    """
    model = TutorialModel(batch.shape[1], 2)
    net = nn.DataParallel(model, device_ids=list(devices)).to(devices[0])
    output = net(batch)
    return sorted(model.seen, key=lambda x: list(devices).index(x.device)), output
