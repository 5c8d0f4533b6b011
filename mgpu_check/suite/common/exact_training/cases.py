"""Specs of exact training: no result rounds, so any distribution over devices gives the same bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True)
class ExactTraining:
    """A perceptron with small integer parameters, trained on integers.

    The loss is the sum of the outputs, each times an integer of the batch, so no gradient rounds. The learning rate and
    the momentum are powers of two, so no step of SGD rounds. For two steps, each intermediate result is a multiple of a
    power of two that float32 represents exactly. So it has the same bits in every order of summation, on every device,
    and in float64.

    Attributes:
        widths: of the inputs, the hidden layers and the outputs.
        batch: samples in the global batch of a step.
        steps: 1 or 2.
        fine: offset of each non-zero parameter from an integer; lower precision would lose it.

    Raises:
        ValueError: `steps` exceeds 2, which would round, or there is no layer.
    """

    widths: tuple[int, ...] = (6, 10, 5)
    batch: int = 8
    steps: int = 2
    momentum: float = 0.5
    seed: int = 0
    fine: float = 0.0

    def __post_init__(self) -> None:
        if self.steps not in (1, 2):
            raise ValueError(f"ExactTraining: steps={self.steps} must be 1 or 2; more would round")
        if len(self.widths) < 2:
            raise ValueError(f"ExactTraining: widths={self.widths} must name inputs and outputs at least")

    @property
    def rate(self) -> float:
        """The learning rate."""
        return 0.25

    def layers(self) -> list[nn.Linear]:
        """Return the linear layers with their initial parameters, float32 on the CPU."""
        import torch
        from torch import nn

        generator = torch.Generator().manual_seed(self.seed)
        layers = []
        with torch.random.fork_rng(devices=[]):
            for inside, outside in zip(self.widths, self.widths[1:], strict=False):
                layers.append(nn.Linear(inside, outside, device="cpu"))
        with torch.no_grad():
            for layer in layers:
                signs = torch.randint(0, 2, layer.weight.shape, generator=generator)
                layer.weight.copy_(2.0 * signs - 1 + self.fine)
                bias = torch.randint(-1, 2, layer.bias.shape, generator=generator)
                layer.bias.copy_(bias + self.fine * (bias != 0))
        return layers

    def model(self) -> nn.Sequential:
        """Return the layers with ReLU between them, float32 on the CPU."""
        from torch import nn

        first, *others = self.layers()
        return nn.Sequential(first, *(part for layer in others for part in (nn.ReLU(), layer)))

    def batches(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return, for each step, inputs (batch, widths[0]) and output factors (batch, widths[-1]), float32 on the
        CPU."""
        import torch

        generator = torch.Generator().manual_seed(self.seed + 1)
        return [
            (
                torch.randint(-2, 3, (self.batch, self.widths[0]), generator=generator).float(),
                torch.randint(-1, 2, (self.batch, self.widths[-1]), generator=generator).float(),
            )
            for _ in range(self.steps)
        ]
