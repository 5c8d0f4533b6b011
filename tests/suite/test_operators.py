"""The table of operators: the acceptance tries every row."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from mgpu_check.asserts.collectives import same_bits
from mgpu_check.oracles.devices import cases, elements
from mgpu_check.oracles.devices.arithmetic import OPERATIONS
from mgpu_check.oracles.devices.cases import (
    BINARY,
    COMPUTATIONS,
    FAMILIES,
    FLOATS,
    FUNCTIONS,
    UNARY,
    ComputeCase,
    ElementwiseOperator,
)
from mgpu_check.oracles.generated_data import anything

CPU = torch.device("cpu")


def test_the_acceptance_tries_each_row_and_each_function():
    rows = (*BINARY, *UNARY)
    assert {row.operation for row in rows} == set(FAMILIES["elementwise"]) - {"conversion"}
    assert set(FAMILIES["functions"]) == set(FUNCTIONS)
    for row in rows:
        assert set(COMPUTATIONS[row.operation].dtypes) <= set(row.dtypes), row.operation


def test_one_more_row_is_one_more_case_of_the_acceptance(monkeypatch):
    row = ElementwiseOperator(lambda a, b: torch.hypot(a, b), "hypotenuse", ("float64",))
    monkeypatch.setattr(cases, "BINARY", (*BINARY, row))
    monkeypatch.setattr(elements, "BINARY", (*BINARY, row))
    made = cases._exact()["hypotenuse"]
    assert (made.dtypes, made.prepare) == (("float64",), "elements:exact")
    monkeypatch.setattr(cases, "OPERATIONS", {"hypotenuse": made.dtypes})
    prepared = elements.exact(ComputeCase("hypotenuse", "float64", 32, 1), CPU)
    result = prepared.call()
    assert prepared.judge is not None and prepared.judge(result) == {}
    assert prepared.judge(result.flip(0)) != {}


@pytest.mark.parametrize("name", COMPUTATIONS)
def test_each_operation_has_its_function_in_a_module_of_the_folder(name):
    module, _, function = COMPUTATIONS[name].prepare.partition(":")
    assert Path(cases.__file__).with_name(f"{module}.py").exists()
    assert OPERATIONS[name].__name__ == function


@pytest.mark.parametrize("dtype", FLOATS)
def test_roots_are_rounded_as_ieee_754_says(dtype):
    (row,) = (row for row in UNARY if row.reference is not None)
    x = anything(3000, getattr(torch, dtype), 5)
    roots = [math.sqrt(value) if value >= 0 else math.nan for value in x.tolist()]
    right = torch.tensor(roots, dtype=torch.float64).to(x.dtype)
    assert row.operation == "square root" and same_bits(row.reference(x).nan_to_num(), right.nan_to_num())
