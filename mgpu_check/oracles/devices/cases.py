"""Specs of copies between devices and the host, and of arithmetic on a GPU with its digests for a vote among GPUs.

This module imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from mgpu_check.oracles.devices.operators import BINARY, FLOATS, FUNCTIONS, INTEGERS, NUMBERS, UNARY

Path = Literal["engine", "strided", "casting"]


@dataclass(frozen=True)
class Copies:
    """Copies of several sizes, made for each pair.

    Attributes:
        path: "engine": contiguous, by a copy engine; "strided": every second byte, and "casting": uint8 to int16, by a
            kernel that reads or writes the memory of its peer.
        sizes: elements of each copy; sizes that do not fit into memory are replaced by one that does.
        source, destination: the offset of the copy in its allocation, in bytes, which sets its alignment.
        together: copy all pairs at once; else one pair after the other.
        pinned: whether memory of the host is pinned.
        pieces: number of copies that transfer each size, of equal parts of it.
        reach: bytes of both allocations in front of the copy; only as much as is copied is filled and compared there.
    """

    path: Path
    sizes: tuple[int, ...]
    source: int = 0
    destination: int = 0
    together: bool = False
    pinned: bool = True
    pieces: int = 1
    reach: int = 0
    seed: int = 0

    def __str__(self) -> str:
        sizes = "+".join(map(str, self.sizes))
        how = f" in {self.pieces} pieces" * (self.pieces > 1) + ", all at once" * self.together
        how += f", {self.reach} bytes into memory" * (self.reach > 0)
        return f"{self.path}, {sizes} bytes, alignment {self.source} to {self.destination}{how}, seed {self.seed}"


_CORES = ("float64", "float32", "tf32", "float16", "bfloat16")
_FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
_TENSOR_CORES = (*_CORES, *_FLOAT8, "int8")


@dataclass(frozen=True)
class Computation:
    """An operation of the acceptance's check of arithmetic.

    Attributes:
        dtypes: "tf32" is float32 with TF32 allowed; "float32" has TF32 disabled.
        prepare: the module in this folder and its function that makes the operands and the judge, "module:function".
    """

    family: str
    dtypes: tuple[str, ...]
    prepare: str


def _exact() -> dict[str, Computation]:
    """Return the operations for the rows of the table of operators."""
    dtypes_by_operation: dict[str, tuple[str, ...]] = {}
    for row in (*BINARY, *UNARY):
        dtypes_by_operation[row.operation] = tuple(
            name for name in dtypes_by_operation.get(row.operation, NUMBERS) if name in row.dtypes
        )
    return {name: Computation("elementwise", dtypes, "elements:exact") for name, dtypes in dtypes_by_operation.items()}


COMPUTATIONS: Mapping[str, Computation] = MappingProxyType(
    {
        "product known by algebra": Computation("products", _TENSOR_CORES, "products:known_by_algebra"),
        "product by Freivalds' check": Computation("products", _TENSOR_CORES, "products:checked_by_freivalds"),
        "product of random numbers": Computation("products", (*_CORES, *_FLOAT8), "products:of_random_numbers"),
        "products of many shapes": Computation("products", _TENSOR_CORES, "products:shapes_known_by_algebra"),
        "batched product known by algebra": Computation("products", _CORES, "products:batches_known_by_algebra"),
        "batched product of random numbers": Computation("products", _CORES, "products:batches_of_random_numbers"),
        "convolution known by algebra": Computation("layers", _CORES, "products:convolution_known_by_algebra"),
        "convolution of random numbers": Computation("layers", _CORES, "products:convolution_of_random_numbers"),
        "attention known by algebra": Computation("layers", FLOATS, "products:attention_known_by_algebra"),
        "attention of random numbers": Computation("layers", FLOATS, "products:attention_of_random_numbers"),
        "layer norm of random numbers": Computation("layers", FLOATS, "products:layer_norm"),
        "softmax of random numbers": Computation("layers", FLOATS, "products:softmax"),
        **_exact(),
        "conversion": Computation("elementwise", ("float64", "float32"), "elements:conversion"),
        **dict.fromkeys(FUNCTIONS, Computation("functions", FLOATS, "elements:bounded")),
        "sum": Computation("reductions", NUMBERS, "elements:sums"),
        "mean": Computation("reductions", FLOATS, "elements:means"),
        "least and greatest": Computation("reductions", NUMBERS, "elements:extremes"),
        "cumulative sum": Computation("reductions", NUMBERS, "elements:cumulative_sums"),
        "count": Computation("reductions", INTEGERS, "elements:counts"),
        "logsumexp of random numbers": Computation("reductions", FLOATS, "elements:logsumexp"),
        "sort": Computation("ordering", NUMBERS, "elements:sort"),
        "topk": Computation("ordering", NUMBERS, "elements:topk"),
        "search": Computation("ordering", NUMBERS, "elements:search"),
        "gather": Computation("ordering", NUMBERS, "elements:gather"),
        "scatter": Computation("ordering", NUMBERS, "elements:scatter"),
        "index": Computation("ordering", NUMBERS, "elements:index"),
        "transpose": Computation("ordering", NUMBERS, "elements:transpose"),
        "random bits": Computation("drawing", ("int64",), "elements:random_bits"),
        "normal numbers": Computation("drawing", ("float32", "float64"), "elements:normal_numbers"),
        "permutation": Computation("drawing", ("int64",), "elements:permutation"),
    }
)
"""Name of an operation -> its row."""

OPERATIONS: Mapping[str, tuple[str, ...]] = MappingProxyType({name: row.dtypes for name, row in COMPUTATIONS.items()})
"""Name of an operation -> its dtypes."""

FAMILIES: Mapping[str, Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        family: {name: row.dtypes for name, row in COMPUTATIONS.items() if row.family == family}
        for family in dict.fromkeys(row.family for row in COMPUTATIONS.values())
    }
)
"""Family -> operation -> dtypes."""

TIMED = (
    *("product known by algebra", "batched product known by algebra"),
    *("convolution known by algebra", "attention known by algebra"),
    *("layer norm of random numbers", "softmax of random numbers", "sum of two", "conversion", "exp", "sum"),
    *("sort", "gather", "scatter", "transpose", "normal numbers"),
)
"""Operations that measure the speed of a GPU: one for each kind of kernel. Their shapes depend on the size only, so
speeds are comparable."""


@dataclass(frozen=True)
class ComputeCase:
    """One operation on a GPU, repeated.

    Attributes:
        operation, dtype: as in `OPERATIONS`.
        size: elements along a side of a matrix, at least 32; all other sizes derive from it.
        seed: of the data and of all other random choices.
        repeats: number of repeats; each result is checked.
        seconds: time limit; no repeat starts after it.
        timed: whether to measure the speed; only for operations in `TIMED`.
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
