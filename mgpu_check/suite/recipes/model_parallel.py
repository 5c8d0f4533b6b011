"""Model parallelism by hand: parts of one model on several devices of a process, or on several ranks.

Between ranks it is pipeline parallelism: each rank holds a stage, and micro-batches pass through, as in *GPipe*.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
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


Loss = Callable[[torch.Tensor, int], torch.Tensor]
"""Takes the outputs of a micro-batch and its number, and returns a scalar."""


def gpipe_step(
    stage: nn.Module,
    index: int,
    stages: int,
    micro_batches: Sequence[torch.Tensor],
    loss: Loss,
    *,
    width: int,
    device: torch.device,
) -> list[torch.Tensor]:
    """Run all micro-batches forward through the stages, then all gradients backward. Fills the gradients of parameters.

    Ranks 0 to `stages` - 1 hold the stages in order, and call this together.

    Args:
        stage: this rank's part of the model.
        index: index of the stage.
        micro_batches: the inputs of the first stage, (samples, …) each; other stages use only their number of samples.
        loss: called on the last stage.
        width: width of the inputs of this stage: (samples, width).

    Returns:
        On the last stage, its output for each micro-batch; elsewhere an empty list.
    """
    last = index == stages - 1
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    outputs: list[torch.Tensor] = []
    for micro_batch in micro_batches:
        if index == 0:
            x = micro_batch.to(device)
        else:
            x = torch.empty(len(micro_batch), width, device=device)
            dist.recv(x, index - 1)
            x.requires_grad_()
        y = stage(x)
        kept.append((x, y))
        if last:
            outputs.append(y.detach())
        else:
            dist.send(y.detach().contiguous(), index + 1)
    for number, (x, y) in enumerate(kept):
        if last:
            loss(y, number).backward()
        else:
            gradient = torch.empty_like(y)
            dist.recv(gradient, index + 1)
            y.backward(gradient)
        if index > 0:
            assert x.grad is not None, "the loss does not depend on the inputs of this stage"
            dist.send(x.grad.contiguous(), index - 1)
    return outputs
