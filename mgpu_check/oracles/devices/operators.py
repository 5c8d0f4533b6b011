"""The table of elementwise operators and functions, with one row for each. It can be read without torch.

The acceptance calls its rows on numbers with any bits.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch
    from torch import nn as nn

    F = nn.functional
else:

    class _OnFirstUse:
        """Stand for torch in tables that processes without torch read too: the first use of an attribute imports it."""

        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, attribute: str) -> Any:
            return getattr(importlib.import_module(self._name), attribute)

    torch, nn, F = (_OnFirstUse(name) for name in ("torch", "torch.nn", "torch.nn.functional"))

Function = Callable[..., Any]
"""Takes operands, returns results."""

FLOATS = ("float64", "float32", "float16", "bfloat16")
INTEGERS = ("int64", "int32", "int16", "int8", "uint8")
NUMBERS = (*FLOATS, *INTEGERS)


@dataclass(frozen=True)
class ElementwiseOperator:
    """An operator whose result IEEE 754 or integer arithmetic define, element by element.

    Attributes:
        call: takes the operands, of one length, and returns a tensor or several.
        operation: the name in the acceptance. Operators with one name there are called together.
        dtypes: the names of the dtypes of the operands.
        reference: computes the right result on the CPU; None: `call` does.
    """

    call: Function
    operation: str
    dtypes: tuple[str, ...]
    reference: Function | None = None


def _divided(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
    divisor = b.bitwise_and(63) + 1
    return [torch.div(a, divisor, rounding_mode=mode) for mode in ("floor", "trunc")] + [torch.remainder(a, divisor)]


def _rounded_roots(a: torch.Tensor) -> torch.Tensor:
    """Return square roots on the CPU as IEEE 754 rounds them.

    Those of torch are from MKL, and some are off by a unit in the last place. A GPU that is simulated on the CPU has
    the same.
    """
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


FUNCTIONS: Mapping[str, BoundedFunction] = MappingProxyType(
    {
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
)
"""Name -> row. The acceptance calls each in all floating dtypes."""
