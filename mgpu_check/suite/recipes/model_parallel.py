"""Model parallelism by hand: parts of one model on several devices of a process."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


class Staged(nn.Module):
    """A sequence of modules, each on its own device; activations are copied between the devices."""

    def __init__(self, stages: Sequence[nn.Module], devices: Sequence[torch.device]) -> None:
        super().__init__()
        self.devices = list(devices)
        self.stages = nn.ModuleList(stage.to(device) for stage, device in zip(stages, devices, strict=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of the last stage, on its device; `x` may be on any device."""
        for stage, device in zip(self.stages, self.devices, strict=True):
            x = stage(x.to(device))
        return x


class Branched(nn.Module):
    """Parallel modules with one input, each on its own device; their outputs are summed on the last device."""

    def __init__(self, branches: Sequence[nn.Module], devices: Sequence[torch.device]) -> None:
        super().__init__()
        self.devices = list(devices)
        self.branches = nn.ModuleList(branch.to(device) for branch, device in zip(branches, devices, strict=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of the outputs, on the last device; `x` may be on any device."""
        end = self.devices[-1]
        outputs = [branch(x.to(device)) for branch, device in zip(self.branches, self.devices, strict=True)]
        total: torch.Tensor = outputs[-1]
        for output in outputs[:-1]:
            total = total + output.to(end)
        return total
