"""Define an operation of the check of arithmetic: its call, and the judge of its first result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mgpu_check.suite.devices.computing.cases import ComputeCase
from mgpu_check.suite.devices.computing.evidence import evidence_of

DTYPES = {
    "tf32": torch.float32,
    **{
        name: getattr(torch, name)
        for name in (
            *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
            *("int64", "int32", "int16", "int8", "uint8"),
        )
    },
}
"""Name of a dtype in a case -> dtype of its operands."""

Judge = Callable[[torch.Tensor], dict[str, Any]]
"""Returns evidence of the errors in a result; empty if it is right."""


class CaseUnsupported(Exception):
    """The device cannot run the case; the message names what it lacks."""


@dataclass(frozen=True)
class Prepared:
    """An operation with its operands.

    Attributes:
        call: runs the operation, always on the same operands.
        judge: judges the first result; None if only repeats and other GPUs can show an error.
        operations: floating-point operations of one call; 0 if they are not counted.
    """

    call: Callable[[], torch.Tensor]
    judge: Judge | None = None
    operations: float = 0.0


Prepare = Callable[[ComputeCase, torch.device], Prepared]


def exactly(expected: torch.Tensor) -> Judge:
    """Judge by known values: every element must equal `expected`, which has neither NaN nor -0.0."""

    def judge(got: torch.Tensor) -> dict[str, Any]:
        if got.shape != expected.shape or got.dtype != expected.dtype:
            return {"errors": got.numel(), "shape": list(got.shape), "dtype": str(got.dtype)}
        wrong = got != expected  # true for NaN
        return evidence_of(got, expected, wrong) if bool(wrong.any()) else {}

    return judge


def seeded(case: ComputeCase, number: int) -> int:
    """Return the seed of operand `number` of a case; `number` is below 1000, so seeds of cases do not overlap."""
    return case.seed * 1000 + number
