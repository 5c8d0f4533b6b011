"""Specs of training runs: a model, batches and steps of an optimizer. This module imports no torch.

Two are without rounding: in integers, which float32 holds exactly, or with other exact results. There any distribution
over devices gives the same bits, so that no tolerance is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from mgpu_check.oracles.tensors import nn, torch

PLAIN = ("mlp", "wide", "deep", "lenet", "residual", "embedding", "attention", "tied")
"""Models of `recipes.whole` without extra arguments or state."""

OPTIMIZERS = ("sgd", "momentum", "adam", "adamw")

_TARGETS = {"tied": 511, "lenet": 63, "residual": 63, "attention": 3, "reused": 63}
"""Largest targets of models whose products would exceed the exact integers of float32 with `_LARGEST`."""
_LARGEST = 4095
"""Needs a significand of 12 bits, so lower precision rounds it: TF32 and float16 have 11 bits, bfloat16 has 8."""


@dataclass(frozen=True)
class WholeRun:
    """A model and batches of integers, with one optimizer step per batch."""

    model: str = "mlp"  # a name in `recipes.whole.BUILDERS`
    batch: int = 8  # rows of the global batch of a step
    steps: int = 1
    # a name in `OPTIMIZERS`; "adam" and "adamw" round, so they are compared on the device itself
    optimizer: str = "sgd"
    # whether parameters, inputs and targets are limited to -1 to 1, for arithmetic in float16 and bfloat16
    small: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            text = f"WholeRun: optimizer={self.optimizer!r} is unknown"
            raise ValueError(f"{text}; choose one of {', '.join(OPTIMIZERS)}")
        if self.batch < 0 or self.steps < 1:
            raise ValueError(f"WholeRun: batch={self.batch} and steps={self.steps} must be at least 0 and 1")

    @property
    def most(self) -> int:
        return 1 if self.small else 3

    def build(self, variant: int = 0) -> nn.Module:
        """Return the initial model, on the CPU. Variants differ in their whole state."""
        from mgpu_check.oracles.training.reference_training import BUILDERS, draw

        return draw(BUILDERS[self.model](), self.seed + 7919 * variant, self.most)

    def optimize(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return an optimizer of the trainable parameters of `model`. The large rate makes each step visible."""
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        # foreach=False: the kernels for several parameters are used for equal strides only
        # (ATen/native/ForeachUtils.h, check_fast_path_restrictions, torch 2.13).
        if self.optimizer == "adam":
            return torch.optim.Adam(parameters, lr=1.0, foreach=False)
        if self.optimizer == "adamw":
            return torch.optim.AdamW(parameters, lr=1.0, weight_decay=0.25, foreach=False)
        return torch.optim.SGD(parameters, lr=1.0, momentum=float(self.optimizer == "momentum"), foreach=False)

    def batches(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return, for each step, inputs (batch, 16) and odd targets (batch, 4), float32 on the CPU."""
        from mgpu_check.oracles.training.reference_training import CLASSES, FEATURES

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

    Raises:
        ValueError: `steps` exceeds 2, which would round, or there is no layer.
    """

    widths: tuple[int, ...] = (6, 10, 5)  # of the inputs, the hidden layers and the outputs
    batch: int = 8  # samples in the global batch of a step
    steps: int = 2  # 1 or 2
    momentum: float = 0.5
    seed: int = 0
    fine: float = 0.0  # offset of each non-zero parameter from an integer; lower precision would lose it

    def __post_init__(self) -> None:
        if self.steps not in (1, 2):
            raise ValueError(f"ExactTraining: steps={self.steps} must be 1 or 2; more would round")
        if len(self.widths) < 2:
            raise ValueError(f"ExactTraining: widths={self.widths} must name inputs and outputs at least")

    @property
    def rate(self) -> float:
        return 0.25

    def layers(self) -> list[nn.Linear]:
        """Return the linear layers with their initial parameters, float32 on the CPU."""
        generator = torch.Generator().manual_seed(self.seed)
        with torch.random.fork_rng(devices=[]):
            layers = [nn.Linear(*widths, device="cpu") for widths in pairwise(self.widths)]
        with torch.no_grad():
            for layer in layers:
                signs = torch.randint(0, 2, layer.weight.shape, generator=generator)
                layer.weight.copy_(2.0 * signs - 1 + self.fine)
                bias = torch.randint(-1, 2, layer.bias.shape, generator=generator)
                layer.bias.copy_(bias + self.fine * (bias != 0))
        return layers

    def model(self) -> nn.Sequential:
        """Return the layers with ReLU between them, float32 on the CPU."""
        head, *others = self.layers()
        return nn.Sequential(head, *(module for layer in others for module in (nn.ReLU(), layer)))

    def batches(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return, for each step, inputs (batch, widths[0]) and output factors (batch, widths[-1]), float32 on the
        CPU."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        return [
            (
                torch.randint(-2, 3, (self.batch, self.widths[0]), generator=generator).float(),
                torch.randint(-1, 2, (self.batch, self.widths[-1]), generator=generator).float(),
            )
            for _ in range(self.steps)
        ]


MODELS = ("mlp", "lenet", "convnet", "resnet18")
"""Without BatchNorm: mlp, lenet. With it: convnet (one convolution), resnet18 (with SiLU in place of ReLU)."""

_IMAGE = {"lenet": (1, 28, 28), "convnet": (1, 8, 8), "resnet18": (1, 16, 16)}
_FEATURES, _CLASSES, _MLP_CLASSES = 6, 10, 4


@dataclass(frozen=True)
class TrainingSpec:
    """A model and the batches that it is trained on, one step of SGD on each."""

    model: str = "mlp"
    batch: int = 4  # samples in the global batch of a step
    steps: int = 1
    windows: int = 1  # micro-batches of each rank in a step, over which gradients are accumulated
    momentum: float = 0.0
    width: int = 8  # channels of the first block of resnet18; 64 is the usual size
    seed: int = 0

    def __post_init__(self) -> None:
        if self.model not in MODELS:
            raise ValueError(f"TrainingSpec: model={self.model!r} is unknown; choose one of {', '.join(MODELS)}")
        for argument in ("batch", "steps", "windows", "width"):
            if getattr(self, argument) < 1:
                raise ValueError(f"TrainingSpec: {argument}={getattr(self, argument)} must be at least 1")

    @property
    def rate(self) -> float:
        """Learning rate: large enough that a step changes the parameters visibly, small enough to stay near them."""
        return 0.05

    def build(self) -> nn.Module:
        """Build the model, its parameters drawn from torch's global generator."""
        from mgpu_check.oracles.training import models

        if self.model == "lenet":
            # Larger than the book's 0.01, so that logits differ between samples from the first step on.
            return models.LeNet(scale=0.05)
        if self.model == "convnet":
            return models.small_convnet(classes=_CLASSES)
        if self.model == "resnet18":
            # Among thousands of ReLUs, some inputs are within rounding error of 0, and either result is correct. A
            # tolerance that accepts both would also accept flipped bits.
            return models.resnet18(classes=_CLASSES, width=self.width, activation=nn.SiLU)
        return models.mlp(features=_FEATURES, classes=_MLP_CLASSES)

    def initial(self, variant: int = 0) -> nn.Module:
        """Return the initial model, on the CPU. Variants differ in their whole state."""
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
