"""Specs of checks that train a transformer, and each GPU's digests for a vote."""

from __future__ import annotations

from dataclasses import dataclass

PRECISIONS = ("float32", "tf32", "bfloat16", "autocast")
"""float32: TF32 is disabled. tf32: float32 with TF32 allowed in products. bfloat16: all in bfloat16, parameters
included.
autocast: parameters in float32, products in bfloat16."""

OPTIMIZERS = ("sgd", "adamw")


@dataclass(frozen=True)
class TransformerCase:
    """A causal transformer and its training.

    Attributes:
        optimizer: one of `OPTIMIZERS`; SGD has momentum.
        tied: whether the output layer shares the weights of the embedding.
        dropout: whether each block drops a tenth of its outputs, by random numbers of the device.
        layers, heads: number of blocks, and of attention heads per block.
        width: elements of each hidden vector; a multiple of `heads`.
        vocabulary: number of different tokens.
        length: tokens in a sequence.
        batch: sequences in a step.
        steps: of the optimizer, each on a batch of its own.
        seed: of parameters, tokens and dropout.
    """

    precision: str = "float32"
    optimizer: str = "sgd"
    tied: bool = False
    dropout: bool = False
    layers: int = 1
    heads: int = 2
    width: int = 16
    vocabulary: int = 32
    length: int = 8
    batch: int = 2
    steps: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        for argument, value, choices in (
            ("precision", self.precision, PRECISIONS),
            ("optimizer", self.optimizer, OPTIMIZERS),
        ):
            if value not in choices:
                raise ValueError(
                    f"TransformerCase: {argument}={value!r} is unknown; choose one of {', '.join(choices)}"
                )
        for argument in ("layers", "heads", "width", "vocabulary", "length", "batch", "steps"):
            if getattr(self, argument) < 1:
                raise ValueError(f"TransformerCase: {argument}={getattr(self, argument)} must be at least 1")
        if self.width % self.heads:
            raise ValueError(f"TransformerCase: width={self.width} must be a multiple of heads={self.heads}")

    def __str__(self) -> str:
        extras = [word for word, is_set in (("tied", self.tied), ("dropout", self.dropout)) if is_set]
        return ", ".join(
            [
                self.precision,
                self.optimizer,
                *extras,
                f"{self.layers} x {self.width}",
                f"{self.batch} x {self.length} tokens",
                f"{self.steps} steps",
                f"seed {self.seed}",
            ]
        )

    @property
    def flops(self) -> float:
        """Floating-point operations of the products in one step.

        Forward: two (a multiplication and an addition) per weight and token. Backward: twice as many.
        """
        weights = self.layers * 12 * self.width**2 + self.width * self.vocabulary
        attention = self.layers * 2 * self.length * self.width
        return 6.0 * self.batch * self.length * (weights + attention)


@dataclass(frozen=True)
class Trained:
    """One GPU's result of a training.

    Attributes:
        value_names: "loss", and the names of the parameters.
        digests: after each step, one number per name, in [-2^63, 2^63), that depends on every bit.
        seconds: time on the device.
    """

    case: TransformerCase
    value_names: tuple[str, ...]
    digests: tuple[tuple[int, ...], ...]
    seconds: float
