"""The table of elementwise operators and functions, with one row for each. It can be read without torch.

The properties of the suite and the acceptance use its rows, with operands of the table or with their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from mgpu_check.suite.common.torch_later import F, torch

Function = Callable[..., Any]
"""Takes operands, returns results."""

Kind = Literal["bits", "values", "numbers", "close"]
"""How a result is compared.

bits: every bit, including the payload of NaN; for operators that only move elements.
values: equal values; every NaN equals every other NaN, and the sign of zero counts.
numbers: as "values", but 0.0 equals -0.0, because no standard fixes the sign of zero for maxima.
close: the error is at most some units in the last place of the largest element, in the dtype of the result (see
`mgpu_check.suite.common.agreement`).
"""

FLOATS = ("float64", "float32", "float16", "bfloat16")
INTEGERS = ("int64", "int32", "int16", "int8", "uint8")
COMPLEX = ("complex64", "complex128")
BOOL = ("bool",)
NUMBERS = (*FLOATS, *INTEGERS)
REAL = (*NUMBERS, *BOOL)
_SIGNED = (*FLOATS, *INTEGERS[:-1])


@dataclass(frozen=True)
class ElementwiseOperator:
    """An operator whose result IEEE 754 or integer arithmetic define, element by element.

    Attributes:
        call: takes the operands, of one length, and returns a tensor or several.
        dtypes: the names of the dtypes of the operands.
        compared: how results are compared with those of the CPU.
        accepted: the operation of the acceptance that calls it, on numbers with any bits; "" if none does. Operators
            with one name there are called together.
        changes: whether it writes to its operands.
        reference: computes the right result on the CPU; None: `call` does.
    """

    name: str
    call: Function
    dtypes: tuple[str, ...]
    compared: Kind = "values"
    accepted: str = ""
    changes: bool = False
    reference: Function | None = None


def _accumulated(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a += b
    return a


def _divided(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
    divisor = b.bitwise_and(63) + 1
    return [torch.div(a, divisor, rounding_mode=mode) for mode in ("floor", "trunc")] + [torch.remainder(a, divisor)]


def _rounded_roots(a: torch.Tensor) -> torch.Tensor:
    """Return square roots on the CPU as IEEE 754 rounds them.

    Those of torch are from MKL, and some are off by a unit in the last place. A GPU that is simulated on the CPU has
    the same.
    """
    import numpy as np

    from mgpu_check.simulated.state import active_node

    if (node := active_node()) is not None and node.backing.type == "cpu":
        return torch.sqrt(a)
    # Rounded twice, a root is right if the wider dtype has 2 p + 2 bits for p of the narrower one, as float32 has here.
    wide = a.float() if a.itemsize < 4 else a
    with np.errstate(invalid="ignore"):
        return torch.from_numpy(np.sqrt(wide.numpy())).to(a.dtype)


def _with_sign(a: torch.Tensor) -> torch.Tensor:
    """Replace NaN of float16 by one: on GPUs it loses its sign (https://github.com/pytorch/pytorch/issues/181806)."""
    return torch.where(torch.isnan(a), 1, a) if a.dtype == torch.float16 else a


BINARY: tuple[ElementwiseOperator, ...] = (
    ElementwiseOperator("add", lambda a, b: torch.add(a, b), REAL, accepted="sum of two"),
    ElementwiseOperator("+", lambda a, b: a + b, REAL),
    ElementwiseOperator("add_", lambda a, b: a.add_(b), REAL, changes=True),
    ElementwiseOperator("+=", _accumulated, NUMBERS, changes=True),
    ElementwiseOperator("add out=", lambda a, b: torch.add(a, b, out=torch.empty_like(a)), NUMBERS),
    ElementwiseOperator("foreach add", lambda a, b: torch._foreach_add([a, b], [b, a]), NUMBERS),
    ElementwiseOperator("sub", lambda a, b: torch.sub(a, b), NUMBERS),
    ElementwiseOperator("mul", lambda a, b: torch.mul(a, b), REAL, accepted="product of two"),
    ElementwiseOperator("*", lambda a, b: a * b, NUMBERS),
    ElementwiseOperator("mul_", lambda a, b: a.mul_(b), NUMBERS, changes=True),
    ElementwiseOperator("div", lambda a, b: torch.div(a, b), FLOATS, accepted="quotient"),
    ElementwiseOperator("div", lambda a, b: torch.div(a, b), INTEGERS),
    ElementwiseOperator("integer division", _divided, INTEGERS, accepted="remainder"),
    ElementwiseOperator("maximum", lambda a, b: torch.maximum(a, b), REAL, "numbers"),
    ElementwiseOperator("minimum", lambda a, b: torch.minimum(a, b), REAL, "numbers"),
    ElementwiseOperator("fmax", lambda a, b: torch.fmax(a, b), FLOATS, "numbers"),
    ElementwiseOperator("clamp", lambda a, b: torch.clamp(a, min=b), NUMBERS, "numbers"),
    ElementwiseOperator("eq", lambda a, b: torch.eq(a, b), REAL),
    ElementwiseOperator("ne", lambda a, b: torch.ne(a, b), REAL),
    ElementwiseOperator("lt", lambda a, b: torch.lt(a, b), REAL),
    ElementwiseOperator("ge", lambda a, b: torch.ge(a, b), REAL),
    ElementwiseOperator("where", lambda a, b: torch.where(a < b, a, b), REAL, "bits"),
    ElementwiseOperator("logical_and", lambda a, b: torch.logical_and(a, b), REAL),
    ElementwiseOperator("logical_xor", lambda a, b: torch.logical_xor(a, b), REAL),
    ElementwiseOperator("copysign", lambda a, b: torch.copysign(a, _with_sign(b)), FLOATS),
    ElementwiseOperator("bitwise_and", lambda a, b: torch.bitwise_and(a, b), (*INTEGERS, *BOOL), accepted="bits"),
    ElementwiseOperator("bitwise_or", lambda a, b: torch.bitwise_or(a, b), (*INTEGERS, *BOOL), accepted="bits"),
    ElementwiseOperator("bitwise_xor", lambda a, b: torch.bitwise_xor(a, b), (*INTEGERS, *BOOL), accepted="bits"),
    ElementwiseOperator("add 0-dim", lambda a, b: a + b[3], NUMBERS),
)
"""Operators with two operands."""

UNARY: tuple[ElementwiseOperator, ...] = (
    ElementwiseOperator("neg", lambda a: torch.neg(a), _SIGNED),
    ElementwiseOperator("abs", lambda a: torch.abs(a), NUMBERS),
    ElementwiseOperator("sign", lambda a: torch.sign(a), NUMBERS, "numbers"),
    ElementwiseOperator("add a number", lambda a: a + 3, NUMBERS),
    ElementwiseOperator("mul by a number", lambda a: a * 2, NUMBERS),
    ElementwiseOperator("shift", lambda a: torch.cat([a << 3, a >> 2]), INTEGERS, accepted="bits"),
    ElementwiseOperator("bitwise_not", lambda a: torch.bitwise_not(a), (*INTEGERS, *BOOL), accepted="bits"),
    ElementwiseOperator("logical_not", lambda a: torch.logical_not(a), REAL),
    ElementwiseOperator("sqrt", lambda a: torch.sqrt(a), FLOATS, accepted="square root", reference=_rounded_roots),
    ElementwiseOperator("floor", lambda a: torch.floor(a), FLOATS, "numbers"),
    ElementwiseOperator("ceil", lambda a: torch.ceil(a), FLOATS, "numbers"),
    ElementwiseOperator("round", lambda a: torch.round(a), FLOATS, "numbers"),
    ElementwiseOperator("trunc", lambda a: torch.trunc(a), FLOATS, "numbers"),
    ElementwiseOperator("isnan", lambda a: torch.isnan(a), FLOATS),
    ElementwiseOperator("isfinite", lambda a: torch.isfinite(a), FLOATS),
    ElementwiseOperator("signbit", lambda a: torch.signbit(_with_sign(a)), FLOATS),
    ElementwiseOperator("nan_to_num", lambda a: torch.nan_to_num(a), FLOATS),
    ElementwiseOperator("relu", lambda a: F.relu(a), FLOATS, "numbers"),
    ElementwiseOperator("hardtanh", lambda a: F.hardtanh(a), FLOATS, "numbers"),
    ElementwiseOperator("masked_fill", lambda a: a.masked_fill(a > 0, 1), NUMBERS, "bits"),
    ElementwiseOperator("zero_", lambda a: a.zero_(), REAL, "bits", changes=True),
    ElementwiseOperator("fill_", lambda a: a.fill_(1), REAL, "bits", changes=True),
)
"""Operators with one operand."""


@dataclass(frozen=True)
class BoundedFunction:
    """A function with documented error bounds.

    Attributes:
        single, double: the largest errors in units in the last place, in float32 and in float64. They come from the
            tables in NVIDIA's *CUDA C++ Programming Guide*, appendix "Mathematical Functions": the largest value of any
            version since 11.
        arguments: the range of the arguments; it keeps results normal in float16.
    """

    call: Function
    single: float
    double: float
    arguments: tuple[float, float]


FUNCTIONS: Mapping[str, BoundedFunction] = MappingProxyType({
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
})  # fmt: skip
"""Name -> row. Suite and acceptance call each in all floating dtypes."""


CALLS: Mapping[str, Function] = MappingProxyType(
    {row.name: row.call for row in (*BINARY, *UNARY)} | {name: row.call for name, row in FUNCTIONS.items()}
)
"""Name of an operator or a function -> its call, for operands of any shape."""
