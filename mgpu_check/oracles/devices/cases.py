"""Specs of copies between devices and the host, and of arithmetic on a GPU with its digests for a vote among GPUs.

A table has a row for each elementwise operator and function; the acceptance calls its rows on numbers with any bits.
This module imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mgpu_check.oracles.tensors import torch

Function = Callable[..., Any]  # takes operands, returns results

FLOATS = ("float64", "float32", "float16", "bfloat16")
INTEGERS = ("int64", "int32", "int16", "int8", "uint8")
NUMBERS = (*FLOATS, *INTEGERS)


@dataclass(frozen=True)
class ElementwiseOperator:
    """An operator whose result IEEE 754 or integer arithmetic define, element by element."""

    call: Function  # takes the operands, of one length, and returns a tensor or several
    operation: str  # the name in the acceptance. Operators with one name there are called together.
    dtypes: tuple[str, ...]  # the names of the dtypes of the operands
    reference: Function | None = None  # computes the right result on the CPU; None: `call` does


def _divided(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
    divisor = b.bitwise_and(63) + 1
    return [torch.div(a, divisor, rounding_mode=mode) for mode in ("floor", "trunc")] + [torch.remainder(a, divisor)]


def _rounded_roots(a: torch.Tensor) -> torch.Tensor:
    """Return square roots on the CPU as IEEE 754 rounds them.
    Those of torch are from MKL, and some are off by a unit in the last place. A GPU that is simulated on the CPU has
    the same."""
    import numpy as np

    from mgpu_check.simulated.node import active_node

    if (node := active_node()) is not None and node.backing.type == "cpu":
        return torch.sqrt(a)
    # Rounded twice, a root is right if the wider dtype has 2 p + 2 bits for p of the narrower one, as float32 has here.
    wide = a.float() if a.itemsize < 4 else a
    with np.errstate(invalid="ignore"):
        return torch.from_numpy(np.sqrt(wide.numpy())).to(a.dtype)


BINARY: tuple[ElementwiseOperator, ...] = (
    ElementwiseOperator(lambda a, b: torch.add(a, b), "sum of two", NUMBERS),
    ElementwiseOperator(lambda a, b: torch.mul(a, b), "product of two", NUMBERS),
    ElementwiseOperator(lambda a, b: torch.div(a, b), "quotient", FLOATS),
    ElementwiseOperator(_divided, "remainder", INTEGERS),
    ElementwiseOperator(lambda a, b: torch.bitwise_and(a, b), "bits", INTEGERS),
    ElementwiseOperator(lambda a, b: torch.bitwise_or(a, b), "bits", INTEGERS),
    ElementwiseOperator(lambda a, b: torch.bitwise_xor(a, b), "bits", INTEGERS),
)
"""Operators with two operands."""

UNARY: tuple[ElementwiseOperator, ...] = (
    ElementwiseOperator(lambda a: torch.cat([a << 3, a >> 2]), "bits", INTEGERS),
    ElementwiseOperator(lambda a: torch.bitwise_not(a), "bits", INTEGERS),
    ElementwiseOperator(lambda a: torch.sqrt(a), "square root", FLOATS, reference=_rounded_roots),
)
"""Operators with one operand."""


@dataclass(frozen=True)
class BoundedFunction:
    call: Function
    # single, double: the largest errors in units in the last place, in float32 and in float64. They come from the
    # tables in NVIDIA's *CUDA C++ Programming Guide*, appendix "Mathematical Functions": the largest value of any
    # version since 11.
    single: float
    double: float
    arguments: tuple[float, float]  # the range of the arguments; it keeps results normal in float16


FUNCTIONS: Mapping[str, BoundedFunction] = {
    "exp": BoundedFunction(lambda x: torch.exp(x), 2, 1, (-9.0, 10.0)),
    "expm1": BoundedFunction(lambda x: torch.expm1(x), 1, 1, (-9.0, 10.0)),
    "log": BoundedFunction(lambda x: torch.log(x), 1, 1, (2.0, 6e4)),
    "log1p": BoundedFunction(lambda x: torch.log1p(x), 1, 1, (0.1, 6e4)),
    "sin": BoundedFunction(lambda x: torch.sin(x), 2, 2, (0.1, 3.0)),
    "cos": BoundedFunction(lambda x: torch.cos(x), 2, 2, (-1.5, 1.5)),
    "atan": BoundedFunction(lambda x: torch.atan(x), 2, 2, (0.01, 60.0)),
    "tanh": BoundedFunction(lambda x: torch.tanh(x), 2, 2, (0.01, 9.0)),
    "erf": BoundedFunction(lambda x: torch.erf(x), 2, 2, (0.01, 4.0)),
    "rsqrt": BoundedFunction(lambda x: torch.rsqrt(x), 2, 2, (0.01, 6e4)),
}
"""Name -> row. The acceptance calls each in all floating dtypes."""


Path = Literal["engine", "strided", "casting"]


@dataclass(frozen=True)
class Copies:
    """Copies of several sizes, made for each pair."""

    # "engine": contiguous, by a copy engine; "strided": every second byte, and "casting": uint8 to int16, by a kernel
    # that reads or writes the memory of its peer
    path: Path
    sizes: tuple[int, ...]  # elements of each copy; sizes that do not fit into memory are replaced by one that does
    # source, destination: the offset of the copy in its allocation, in bytes, which sets its alignment
    source: int = 0
    destination: int = 0
    together: bool = False  # copy all pairs at once; else one pair after the other
    pinned: bool = True  # whether memory of the host is pinned
    # number of copies that transfer each size, of equal parts of it; every other one of several has plain words
    pieces: int = 1
    # bytes of both allocations in front of the copy; only as much as is copied is filled and compared there
    reach: int = 0
    seed: int = 0

    def __str__(self) -> str:
        sizes = "+".join(map(str, self.sizes))
        how = (f" in {self.pieces} pieces" if self.pieces > 1 else "") + (", all at once" if self.together else "")
        how += f", {self.reach} bytes into memory" if self.reach else ""
        return f"{self.path}, {sizes} bytes, alignment {self.source} to {self.destination}{how}, seed {self.seed}"


SECOND_LONGEST = ", second longest"
"""Ends the names of quantities that `Laps` measure."""

CALLS_PER_STALL = 4.74
"""Calls to time, for each stall that is expected, so that two stalls are among them with a probability of 95 %: P(fewer
than 2) = (1 + c) exp(-c) = 0.05 for a Poisson distribution with the mean c."""


@dataclass(frozen=True)
class Laps:
    """Calls that are timed one by one, to find rare ones that stall."""

    count: int
    bytes: int  # of each call: enough for the device to set the pace, not the host that gives it work


_CORES = ("float64", "float32", "tf32", "float16", "bfloat16")
_FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
_TENSOR_CORES = (*_CORES, *_FLOAT8, "int8")


@dataclass(frozen=True)
class Computation:
    family: str
    dtypes: tuple[str, ...]  # "tf32" is float32 with TF32 allowed; "float32" has TF32 disabled
    prepare: str  # the module in this folder and its function that makes the operands and the judge, "module:function"
    needs_units: bool = True  # a device without units for the dtype leaves the operation out


def _exact() -> dict[str, Computation]:
    dtypes_by_operation: dict[str, tuple[str, ...]] = {}
    for row in (*BINARY, *UNARY):
        dtypes_by_operation[row.operation] = tuple(
            name for name in dtypes_by_operation.get(row.operation, NUMBERS) if name in row.dtypes
        )
    return {name: Computation("elementwise", dtypes, "elements:exact") for name, dtypes in dtypes_by_operation.items()}


COMPUTATIONS: Mapping[str, Computation] = {
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
    "count": Computation("reductions", INTEGERS, "elements:counts", needs_units=False),
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
"""Name of an operation -> its row."""

OPERATIONS: Mapping[str, tuple[str, ...]] = {name: row.dtypes for name, row in COMPUTATIONS.items()}
"""Name of an operation -> its dtypes."""

FAMILIES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    family: {name: row.dtypes for name, row in COMPUTATIONS.items() if row.family == family}
    for family in dict.fromkeys(row.family for row in COMPUTATIONS.values())
}
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
    # operation, dtype: as in `OPERATIONS`
    operation: str
    dtype: str
    size: int  # elements along a side of a matrix, at least 32; all other sizes derive from it
    seed: int  # of the data and of all other random choices
    repeats: int = 1  # number of repeats; each result is checked
    seconds: float = 1.0  # time limit; no repeat starts after it
    timed: bool = False  # whether to measure the speed; only for operations in `TIMED`

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
    """One GPU's result of a case, for a comparison among GPUs."""

    case: ComputeCase
    digest: int  # of all bits of the result
