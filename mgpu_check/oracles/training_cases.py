"""Specs of training without rounding: in integers, which float32 holds exactly, or with other exact results.

Any distribution over devices gives the same bits, so that no tolerance is needed. This module imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import nn


PLAIN = ("mlp", "wide", "deep", "lenet", "residual", "embedding", "attention", "tied")
"""Models of `recipes.whole` without extra arguments or state."""

OPTIMIZERS = ("sgd", "momentum", "adam", "adamw")

_TARGETS = {"tied": 511, "lenet": 63, "residual": 63, "attention": 3, "reused": 63}
"""Largest targets of models whose products would exceed the exact integers of float32 with `_LARGEST`."""
_LARGEST = 4095
"""Needs a significand of 12 bits, so lower precision rounds it: TF32 and float16 have 11 bits, bfloat16 has 8."""


@dataclass(frozen=True)
class WholeRun:
    """A model and batches of integers, with one optimizer step per batch.

    Attributes:
        model: a name in `recipes.whole.BUILDERS`.
        batch: rows of the global batch of a step.
        optimizer: a name in `OPTIMIZERS`; "adam" and "adamw" round, so they are compared on the device itself.
        small: whether parameters, inputs and targets are limited to -1 to 1, for arithmetic in float16 and bfloat16.

    Raises:
        ValueError: the optimizer is unknown, or a number is too small.
    """

    model: str = "mlp"
    batch: int = 8
    steps: int = 1
    optimizer: str = "sgd"
    small: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(
                f"WholeRun: optimizer={self.optimizer!r} is unknown; choose one of {', '.join(OPTIMIZERS)}"
            )
        if self.batch < 0 or self.steps < 1:
            raise ValueError(f"WholeRun: batch={self.batch} and steps={self.steps} must be at least 0 and 1")

    @property
    def most(self) -> int:
        """The largest parameter."""
        return 1 if self.small else 3

    def build(self, variant: int = 0) -> nn.Module:
        """Return the initial model, on the CPU. Variants differ in their whole state."""
        from mgpu_check.oracles.reference_training import BUILDERS, draw

        return draw(BUILDERS[self.model](), self.seed + 7919 * variant, self.most)

    def optimize(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return an optimizer of the trainable parameters of `model`. The large rate makes each step visible."""
        import torch

        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        # foreach=False, because the fused kernels for several parameters depend on their strides.
        if self.optimizer == "adam":
            return torch.optim.Adam(parameters, lr=1.0, foreach=False)
        if self.optimizer == "adamw":
            return torch.optim.AdamW(parameters, lr=1.0, weight_decay=0.25, foreach=False)
        return torch.optim.SGD(parameters, lr=1.0, momentum=float(self.optimizer == "momentum"), foreach=False)

    def batches(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return, for each step, inputs (batch, 16) and odd targets (batch, 4), float32 on the CPU."""
        import torch

        from mgpu_check.oracles.reference_training import CLASSES, FEATURES

        generator = torch.Generator().manual_seed(self.seed)
        targets = 1 if self.small else _TARGETS.get(self.model, _LARGEST)
        inputs, half = 1 if self.small else 3, (targets + 1) // 2

        return [
            (
                torch.randint(-inputs, inputs + 1, (self.batch, FEATURES), generator=generator).float(),
                (torch.randint(-half, half, (self.batch, CLASSES), generator=generator) * 2 + 1).float(),
            )
            for _ in range(self.steps)
        ]


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

        head, *others = self.layers()
        return nn.Sequential(head, *(module for layer in others for module in (nn.ReLU(), layer)))

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
