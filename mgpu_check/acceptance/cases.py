"""Specs of checks of memory, of training and of soaks, and the results of a GPU. This module imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

PATTERNS = ("address", "inversions", "walking ones", "walking zeros", "checkerboard", "random")
"""The patterns to write; see `mgpu_check.acceptance.memory.checks`."""


@dataclass(frozen=True)
class MemoryCase:
    """One check of the memory of a GPU."""

    pattern: str
    share: float  # share of the free memory to write and read back; more than 0, less than 1
    seed: int  # determines the shifts and seeds of the pattern, and the places that the host reads
    passes: int = 1  # how often all of it is written and read back
    hold_seconds: float = 0.0  # seconds under load between writing and reading

    def __post_init__(self) -> None:
        if self.pattern not in PATTERNS:
            raise ValueError(f"MemoryCase: pattern={self.pattern!r} is unknown; choose one of {', '.join(PATTERNS)}")
        if not 0 < self.share < 1:
            raise ValueError(f"MemoryCase: share={self.share} must be more than 0 and less than 1")
        if self.passes < 1:
            raise ValueError(f"MemoryCase: passes={self.passes} must be at least 1")

    def __str__(self) -> str:
        times = "1 pass" if self.passes == 1 else f"{self.passes} passes"
        suffix = f", kept for {self.hold_seconds:g} s under load" if self.hold_seconds else ""
        return f"{self.pattern}, {times} over {self.share:g} of the free memory{suffix}, seed {self.seed}"


PRECISIONS = ("float32", "tf32", "bfloat16", "autocast")
"""float32: TF32 is disabled. tf32: float32 with TF32 allowed in products. bfloat16: all in bfloat16, parameters
included.
autocast: parameters in float32, products in bfloat16."""

OPTIMIZERS = ("sgd", "adamw")


@dataclass(frozen=True)
class TransformerCase:
    """A causal transformer and its training."""

    precision: str = "float32"
    optimizer: str = "sgd"  # one of `OPTIMIZERS`; SGD has momentum
    tied: bool = False  # whether the output layer shares the weights of the embedding
    dropout: bool = False  # whether each block drops a tenth of its outputs, by random numbers of the device
    # layers, heads: number of blocks, and of attention heads per block
    layers: int = 1
    heads: int = 2
    width: int = 16  # elements of each hidden vector; a multiple of `heads`
    vocabulary: int = 32  # number of different tokens
    length: int = 8  # tokens in a sequence
    batch: int = 2  # sequences in a step
    steps: int = 2  # of the optimizer, each on a batch of its own
    seed: int = 0  # of parameters, tokens and dropout

    def __post_init__(self) -> None:
        for argument, choices in (("precision", PRECISIONS), ("optimizer", OPTIMIZERS)):
            if (value := getattr(self, argument)) not in choices:
                choose = f"choose one of {', '.join(choices)}"
                raise ValueError(f"TransformerCase: {argument}={value!r} is unknown; {choose}")
        for argument in ("layers", "heads", "width", "vocabulary", "length", "batch", "steps"):
            if getattr(self, argument) < 1:
                raise ValueError(f"TransformerCase: {argument}={getattr(self, argument)} must be at least 1")
        if self.width % self.heads:
            raise ValueError(f"TransformerCase: width={self.width} must be a multiple of heads={self.heads}")

    def __str__(self) -> str:
        extras = [word for word, is_set in (("tied", self.tied), ("dropout", self.dropout)) if is_set]
        sizes = f"{self.layers} x {self.width}, {self.batch} x {self.length} tokens, {self.steps} steps"
        return ", ".join([self.precision, self.optimizer, *extras, sizes, f"seed {self.seed}"])

    @property
    def flops(self) -> float:
        """Floating-point operations of the products in one step.
        Forward: two (a multiplication and an addition) per weight and token. Backward: twice as many."""
        weights = self.layers * 12 * self.width**2 + self.width * self.vocabulary
        attention = self.layers * 2 * self.length * self.width
        return 6.0 * self.batch * self.length * (weights + attention)


@dataclass(frozen=True)
class Trained:
    """One GPU's result of a training."""

    case: TransformerCase
    value_names: tuple[str, ...]  # "loss", and the names of the parameters
    # after each step, one number per name, in [-2^63, 2^63), that depends on every bit
    digests: tuple[tuple[int, ...], ...]
    seconds: float  # time on the device


@dataclass(frozen=True)
class SoakCase:
    """One round of load: training, rewriting and comparing memory, collectives, and copies."""

    training: TransformerCase
    every: int  # number of training steps between two turns of all other work, each with digests
    memory_share: float  # share of the remaining free memory to rewrite and compare
    collective: int  # int32 elements that each rank contributes; a multiple of the number of ranks
    copied: int  # 64-bit words to copy to the device and back
    number: int  # of the round, from 1; seeds the written and copied data

    def __str__(self) -> str:
        return f"round {self.number}: {self.training}"


@dataclass(frozen=True)
class Loaded:
    """One GPU's results of a round."""

    trained: Trained  # the result of the training, with digests after each `SoakCase.every` steps
    seconds: float  # under load, by the clock of the host
    steps: tuple[float, ...]  # seconds of each step, by the clock of the device
    bytes: int  # written to memory and compared, copied, and contributed to collectives
    reduced: int  # number of wrong elements in the sum over all ranks
    exchanged: Mapping[int, int]  # rank -> number of wrong elements received from it
