"""Mismatch: operators with operands on different devices raise and name both devices, or work if they should."""

from __future__ import annotations

import pytest
from hypothesis import given

from mgpu_check import strategies
from mgpu_check.engine.rank_side.rank import NamedFunction
from mgpu_check.oracles.strategies import examples
from mgpu_check.plugin.ranks import Gpus
from mgpu_check.strategies import OperatorTable

CHECKS = "mgpu_check.suite.mismatch.checks"


@examples(6, quick=1)
@given(table=strategies.operator_tables(must_raise=True, without=("modules", "scalars")))
def test_operators_refuse_operands_apart(gpus: Gpus, table: OperatorTable) -> None:
    """An operator with operands on two devices raises an error that names both."""
    NamedFunction(f"{CHECKS}:assert_each_refused")(table.cases())


@examples(6, quick=1)
@given(table=strategies.operator_tables(must_raise=True, only="modules"))
def test_modules_refuse_inputs_elsewhere(gpus: Gpus, table: OperatorTable) -> None:
    """A module with its parameters on another device than its input raises an error that names both."""
    NamedFunction(f"{CHECKS}:assert_each_refused")(table.cases())


@examples(6, quick=2)
@given(table=strategies.operator_tables(must_raise=True, only="scalars"))
def test_gpu_scalars_are_no_numbers(gpus: Gpus, table: OperatorTable) -> None:
    """A 0-dim tensor on a GPU, or as the target of a write, must be on the device of the other operands."""
    NamedFunction(f"{CHECKS}:assert_each_refused")(table.cases())


@examples(10, quick=3)
@given(table=strategies.operator_tables(must_raise=False, without=("copies",)))
def test_cpu_scalars_and_indices_work(gpus: Gpus, table: OperatorTable) -> None:
    """A 0-dim tensor and an index on the CPU work with a tensor on any device."""
    NamedFunction(f"{CHECKS}:assert_each_works")(table.cases())


@examples(10, quick=3)
@given(table=strategies.operator_tables(must_raise=False, only="copies"))
def test_copies_cross_devices(gpus: Gpus, table: OperatorTable) -> None:
    """Copies work between any two devices: copy_, assignment to a slice, to, load_state_dict."""
    NamedFunction(f"{CHECKS}:assert_each_works")(table.cases())


@pytest.mark.gpus(2)
@examples(20)
@given(rows=strategies.batch_sizes(2, empty=False))
def test_data_parallel_wants_its_first_device(gpus: Gpus, rows: int) -> None:
    """DataParallel refuses a module that is not on its first device, with an error that names both devices."""
    NamedFunction(f"{CHECKS}:assert_data_parallel_refuses")(gpus, rows)
