"""What an operation is to the check of arithmetic: how it is called, and how its first result is judged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mgpu_check.checks.computing.evidence import evidence_of
from mgpu_check.specs.compute import ComputeCase

__all__ = ["DTYPES", "OPERATIONS", "Prepare", "Prepared", "Unsupported", "exactly", "operation", "seeded"]

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
"""Dtypes by the names in cases."""

Judge = Callable[[torch.Tensor], dict[str, Any]]
"""Returns evidence of what is wrong with a result; nothing if it is right."""


class Unsupported(Exception):
    """The device does not have what the case is about; the message says what it lacks."""


@dataclass(frozen=True)
class Prepared:
    """An operation with its operands.

    Attributes:
        call: does it; always with the same operands.
        judge: None where only repeats and other GPUs tell.
        operations: floating-point operations of one call; 0 where they are not counted.
    """

    call: Callable[[], torch.Tensor]
    judge: Judge | None = None
    operations: float = 0.0


Prepare = Callable[[ComputeCase, torch.device], Prepared]

OPERATIONS: dict[str, Prepare] = {}
"""Operation -> what makes its operands, by the names of `mgpu_check.specs.compute.OPERATIONS`."""


def operation(name: str) -> Callable[[Prepare], Prepare]:
    """Register what prepares an operation."""

    def register(prepare: Prepare) -> Prepare:
        OPERATIONS[name] = prepare
        return prepare

    return register


def exactly(expected: torch.Tensor) -> Judge:
    """Judge by values that are known, each of which must be right; they are neither NaN nor -0.0."""

    def judge(got: torch.Tensor) -> dict[str, Any]:
        if got.shape != expected.shape or got.dtype != expected.dtype:
            return {"errors": got.numel(), "shape": list(got.shape), "dtype": str(got.dtype)}
        wrong = got != expected  # true for NaN
        return evidence_of(got, expected, wrong) if bool(wrong.any()) else {}

    return judge


def seeded(case: ComputeCase, number: int) -> int:
    """Return the seed of an operand of a case: different for each number, below 1000."""
    return case.seed * 1000 + number
