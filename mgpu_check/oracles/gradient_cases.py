"""Specs of training runs: a model, batches and steps of an optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import nn


MODELS = ("mlp", "lenet", "convnet", "resnet18")
"""Without BatchNorm: mlp, lenet. With it: convnet (one convolution), resnet18 (with SiLU in place of ReLU)."""

_IMAGE = {"lenet": (1, 28, 28), "convnet": (1, 8, 8), "resnet18": (1, 16, 16)}
_FEATURES, _CLASSES, _MLP_CLASSES = 6, 10, 4


@dataclass(frozen=True)
class TrainingSpec:
    """A model and the batches that it is trained on, one step of SGD on each.

    Raises:
        ValueError: the model is unknown, or a number is too small.
    """

    model: str = "mlp"
    batch: int = 4
    """Samples in the global batch of a step."""
    steps: int = 1
    windows: int = 1
    """Micro-batches of each rank in a step, over which gradients are accumulated."""
    momentum: float = 0.0
    width: int = 8
    """Channels of the first block of resnet18; 64 is the usual size."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.model not in MODELS:
            raise ValueError(f"TrainingSpec: model={self.model!r} is unknown; choose one of {', '.join(MODELS)}")
        for argument, value in {
            "batch": self.batch,
            "steps": self.steps,
            "windows": self.windows,
            "width": self.width,
        }.items():
            if value < 1:
                raise ValueError(f"TrainingSpec: {argument}={value} must be at least 1")

    @property
    def rate(self) -> float:
        """Learning rate: large enough that a step changes the parameters visibly, small enough to stay near them."""
        return 0.05

    def build(self) -> nn.Module:
        """Build the model, its parameters drawn from torch's global generator."""
        from mgpu_check.oracles import models

        if self.model == "lenet":
            # Larger than the book's 0.01, so that logits differ between samples from the first step on.
            return models.LeNet(scale=0.05)
        if self.model == "convnet":
            return models.small_convnet(classes=_CLASSES)
        if self.model == "resnet18":
            from torch import nn

            # Among thousands of ReLUs, some inputs are within rounding error of 0, and either result is correct. A
            # tolerance that accepts both would also accept flipped bits.
            return models.resnet18(classes=_CLASSES, width=self.width, activation=nn.SiLU)
        return models.mlp(features=_FEATURES, classes=_MLP_CLASSES)

    def initial(self, variant: int = 0) -> nn.Module:
        """Return the initial model, on the CPU. Variants differ in their whole state."""
        import torch

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1000 * variant + self.seed)
            model = self.build()
            with torch.no_grad():
                for buffer in model.buffers():
                    # With the initial 0 and 1, statistics that are never used would remain unnoticed.
                    if buffer.is_floating_point():
                        buffer.add_(torch.rand_like(buffer))
        return model

    def batches(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the batch of each step on the CPU: inputs (batch, …) float32, labels (batch,) int64."""
        import torch

        generator = torch.Generator().manual_seed(self.seed)
        shape = _IMAGE.get(self.model, (_FEATURES,))
        classes = _MLP_CLASSES if self.model == "mlp" else _CLASSES
        return [
            (
                torch.randn(self.batch, *shape, generator=generator),
                torch.randint(0, classes, (self.batch,), generator=generator),
            )
            for _ in range(self.steps)
        ]
