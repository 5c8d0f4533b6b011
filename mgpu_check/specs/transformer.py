"""What a check that trains a transformer is to do, as plain values, and what each GPU says for a vote."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["OPTIMIZERS", "PRECISIONS", "Trained", "TransformerCase"]

PRECISIONS = ("float32", "tf32", "bfloat16", "autocast")
"""float32: without TF32. tf32: float32 whose products may be rounded to TF32. bfloat16: parameters, too. autocast: parameters in
float32, products in bfloat16."""

OPTIMIZERS = ("sgd", "adamw")


@dataclass(frozen=True)
class TransformerCase:
    """A causal transformer, and how it is trained.

    Attributes:
        precision: one of `PRECISIONS`.
        optimizer: one of `OPTIMIZERS`; SGD has momentum.
        tied: whether the output layer has the weights of the embedding.
        dropout: whether a tenth of what goes through each block is left out, by random numbers of the device.
        layers, heads: blocks, and heads of attention in each.
        width: elements of each hidden vector; a multiple of `heads`.
        vocabulary: different tokens.
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
        for argument, value, known in (
            ("precision", self.precision, PRECISIONS),
            ("optimizer", self.optimizer, OPTIMIZERS),
        ):
            if value not in known:
                raise ValueError(f"TransformerCase: {argument}={value!r} is unknown; choose one of {', '.join(known)}")
        for argument in ("layers", "heads", "width", "vocabulary", "length", "batch", "steps"):
            if getattr(self, argument) < 1:
                raise ValueError(f"TransformerCase: {argument}={getattr(self, argument)} must be at least 1")
        if self.width % self.heads:
            raise ValueError(f"TransformerCase: width={self.width} must be a multiple of heads={self.heads}")

    def __str__(self) -> str:
        extras = [word for word, there in (("tied", self.tied), ("dropout", self.dropout)) if there]
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
        """Floating-point operations of the products in one step: twice a multiplication for each weight and token, forward, and
        twice as much backward.
        """
        weights = self.layers * 12 * self.width**2 + self.width * self.vocabulary
        attention = self.layers * 2 * self.length * self.width
        return 6.0 * self.batch * self.length * (weights + attention)


@dataclass(frozen=True)
class Trained:
    """What one GPU says of its training.

    Attributes:
        names: "loss", and the names of the parameters.
        digests: after each step, one number for each name, in [-2^63, 2^63), that depends on every bit.
        seconds: that the device took.
    """

    case: TransformerCase
    names: tuple[str, ...]
    digests: tuple[tuple[int, ...], ...]
    seconds: float
