"""Specs of arithmetic checks of a GPU, and their digests for a vote among GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

__all__ = ["FAMILIES", "OPERATIONS", "TIMED", "Ballot", "ComputeCase"]

_FLOATS = ("float64", "float32", "float16", "bfloat16")
_CORES = ("float64", "float32", "tf32", "float16", "bfloat16")
_FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
_INTEGERS = ("int64", "int32", "int16", "int8", "uint8")

FAMILIES: Mapping[str, Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "products": {
            "product known by algebra": (*_CORES, *_FLOAT8, "int8"),
            "product by Freivalds' check": (*_CORES, *_FLOAT8, "int8"),
            "product of random numbers": (*_CORES, *_FLOAT8),
            "batched product known by algebra": _CORES,
            "batched product of random numbers": _CORES,
        },
        "layers": {
            "convolution known by algebra": _CORES,
            "convolution of random numbers": _CORES,
            "attention known by algebra": _FLOATS,
            "attention of random numbers": _FLOATS,
            "layer norm of random numbers": _FLOATS,
            "softmax of random numbers": _FLOATS,
        },
        "elementwise": {
            "sum of two": (*_FLOATS, *_INTEGERS),
            "product of two": (*_FLOATS, *_INTEGERS),
            "quotient": _FLOATS,
            "remainder": _INTEGERS,
            "square root": _FLOATS,
            "bits": _INTEGERS,
            "conversion": ("float64", "float32"),
        },
        "functions": dict.fromkeys(
            ("exp", "expm1", "log", "log1p", "sin", "cos", "atan", "tanh", "erf", "rsqrt"), _FLOATS
        ),
        "reductions": {
            "sum": (*_FLOATS, *_INTEGERS),
            "mean": _FLOATS,
            "least and greatest": (*_FLOATS, *_INTEGERS),
            "cumulative sum": (*_FLOATS, *_INTEGERS),
            "count": _INTEGERS,
            "logsumexp of random numbers": _FLOATS,
        },
        "ordering": {
            "sort": (*_FLOATS, *_INTEGERS),
            "topk": (*_FLOATS, *_INTEGERS),
            "search": (*_FLOATS, *_INTEGERS),
            "gather": (*_FLOATS, *_INTEGERS),
            "scatter": (*_FLOATS, *_INTEGERS),
            "index": (*_FLOATS, *_INTEGERS),
            "transpose": (*_FLOATS, *_INTEGERS),
        },
        "drawing": {"random bits": ("int64",), "normal numbers": ("float32", "float64"), "permutation": ("int64",)},
    }
)
"""Family -> operation -> dtypes. "tf32" is float32 with TF32 allowed; "float32" has TF32 disabled."""

OPERATIONS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {name: dtypes for family in FAMILIES.values() for name, dtypes in family.items()}
)
"""Operation -> dtypes, of all families."""


TIMED = ("product known by algebra", "convolution known by algebra", "attention known by algebra")
"""Operations that measure the speed of a GPU. Their shapes depend on the size only, so rates are comparable."""


@dataclass(frozen=True)
class ComputeCase:
    """One operation on a GPU, repeated.

    Attributes:
        operation, dtype: as in `OPERATIONS`.
        size: elements along a side of a matrix, at least 32; all other sizes derive from it.
        seed: of the data and of all other random choices.
        repeats: number of repeats; each result is checked.
        seconds: time limit; no repeat starts after it.
        timed: whether to measure the rate; only for operations in `TIMED`, whose number of floating-point operations is
            known.
    """

    operation: str
    dtype: str
    size: int
    seed: int
    repeats: int = 1
    seconds: float = 1.0
    timed: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in OPERATIONS.get(self.operation, ()):
            raise ValueError(f"ComputeCase: operation={self.operation!r}, dtype={self.dtype!r}: see OPERATIONS")
        if self.size < 32:
            raise ValueError(f"ComputeCase: size={self.size} must be at least 32")
        if self.timed and self.operation not in TIMED:
            raise ValueError(f"ComputeCase: timed=True with {self.operation!r}; only {', '.join(TIMED)} are timed")
        if self.repeats < 1:
            raise ValueError(f"ComputeCase: repeats={self.repeats} must be at least 1")

    def __str__(self) -> str:
        return f"{self.operation}, {self.dtype}, size {self.size}, seed {self.seed}"


@dataclass(frozen=True)
class Ballot:
    """One GPU's result of a case, for a comparison among GPUs.

    Attributes:
        digest: of all bits of the result.
    """

    case: ComputeCase
    digest: int
