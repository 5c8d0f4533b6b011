"""Operands on different devices: operators that must raise do, naming both; operators that must work do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given

from mgpu_check import strategies
from mgpu_check.strategies import OperatorCase, TensorSpec
from mgpu_check.suite.budget import examples

if TYPE_CHECKING:
    import torch


@examples(140)
@given(case=strategies.operator_cases(must_raise=True, without=("modules", "scalars")))
def test_operators_refuse_operands_apart(gpus: tuple[torch.device, ...], case: OperatorCase) -> None:
    """An operator whose operands lie on two devices raises, and names both."""
    from mgpu_check.checks import mismatch

    mismatch.assert_refused(case)


@examples(50)
@given(case=strategies.operator_cases(must_raise=True, only="modules"))
def test_modules_refuse_inputs_elsewhere(gpus: tuple[torch.device, ...], case: OperatorCase) -> None:
    """A module whose parameters lie on another device than its input raises, and names both."""
    from mgpu_check.checks import mismatch

    mismatch.assert_refused(case)


@examples(40)
@given(case=strategies.operator_cases(must_raise=True, only="scalars"))
def test_gpu_scalars_are_no_numbers(gpus: tuple[torch.device, ...], case: OperatorCase) -> None:
    """A 0-dim tensor on a GPU, and one that is written to, must be where the other operands are."""
    from mgpu_check.checks import mismatch

    mismatch.assert_refused(case)


@examples(50)
@given(case=strategies.operator_cases(must_raise=False, without=("copies",)))
def test_cpu_scalars_and_indices_work(gpus: tuple[torch.device, ...], case: OperatorCase) -> None:
    """A 0-dim tensor and an index on the CPU work with a tensor on any device."""
    from mgpu_check.checks import mismatch

    mismatch.assert_works(case)


@examples(30)
@given(case=strategies.operator_cases(must_raise=False, only="copies"))
def test_copies_cross_devices(gpus: tuple[torch.device, ...], case: OperatorCase) -> None:
    """Copies work between any two devices: copy_, assignment to a slice, to, load_state_dict."""
    from mgpu_check.checks import mismatch

    mismatch.assert_works(case)


@examples(80)
@given(
    source=strategies.tensors(values=("random", "special")),
    layout=strategies.layouts(1),
    pair=strategies.device_pairs(),
)
def test_copies_keep_every_bit(
    gpus: tuple[torch.device, ...], source: TensorSpec, layout: str, pair: tuple[str, str]
) -> None:
    """A copy to another device holds the source's bits, whatever dtype and layout either has."""
    from mgpu_check.checks import mismatch

    here, there = source.build(pair[0]), source.like(layout).build(pair[1]).zero_()
    mismatch.assert_arrives(here, there, there.copy_(here))
    mismatch.assert_arrives(here, there, here.to(pair[1]))


@pytest.mark.gpus(2)
@examples(20)
@given(rows=strategies.batch_sizes(2, empty=False))
def test_data_parallel_wants_its_first_device(gpus: tuple[torch.device, ...], rows: int) -> None:
    """DataParallel refuses a module that is not on the first of its devices, and names both."""
    import torch

    from mgpu_check.checks.mismatch import raises_device_mismatch

    net = torch.nn.DataParallel(torch.nn.Linear(3, 2).to(gpus[1]), device_ids=list(gpus))
    with raises_device_mismatch(*gpus):
        net(torch.ones(rows, 3))
