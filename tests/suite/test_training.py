"""The checks of whole training runs, on a simulated node in this process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch.nn.parallel import comm

from mgpu_check.errors import GradientMismatch, ReplicaMismatch
from mgpu_check.numerics.steps import MeasuredStep
from mgpu_check.oracles.training import gradient_exchange
from mgpu_check.oracles.training.cases import TrainingSpec
from mgpu_check.oracles.training.gradients import (
    _assert_as_measured,
    assert_data_parallel_agrees,
    assert_step_by_hand_agrees,
)
from mgpu_check.simulated import simulated_node
from mgpu_check.torch_hooks.patches import replaced


@pytest.fixture
def node() -> Iterator[list[torch.device]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with simulated_node(3):
        yield [torch.device("cuda", index) for index in range(3)]
    torch.set_num_threads(threads)


@pytest.mark.parametrize("training", [TrainingSpec("mlp", 7, 2, momentum=0.9), TrainingSpec("convnet", 7, 2)])
def test_data_parallel_agrees(node, training) -> None:
    assert_data_parallel_agrees(training, node)


@pytest.mark.parametrize("width", [8, pytest.param(64, marks=pytest.mark.slow)])
def test_resnet18_agrees(node, width) -> None:
    assert_data_parallel_agrees(TrainingSpec("resnet18", 4, width=width), node[:2])


@pytest.mark.parametrize("model", ["mlp", "lenet"])
def test_step_by_hand_agrees(node, model) -> None:
    assert_step_by_hand_agrees(TrainingSpec(model, 5, 2), node)


def test_a_missing_device_is_told(node) -> None:
    real = comm.reduce_add_coalesced

    def without_last(inputs: Sequence[Sequence[torch.Tensor]], *args: Any, **kwargs: Any) -> Any:
        return real(inputs[:-1], *args, **kwargs)

    with (
        replaced(comm, "reduce_add_coalesced", without_last),
        pytest.raises(
            GradientMismatch,
            match=r"DataParallel on 3 devices: gradient of 0\.weight: element .*; float32\[16, 6\] on cuda:0",
        ),
    ):
        assert_data_parallel_agrees(TrainingSpec("mlp", 6), node)


def test_a_device_that_lags_behind_is_told(node) -> None:
    def not_copied_back(data: Sequence[torch.Tensor]) -> None:
        for other in data[1:]:
            data[0].add_(other.to(data[0].device))

    with (
        replaced(gradient_exchange, "allreduce", not_copied_back),
        pytest.raises(ReplicaMismatch, match="step by hand on 3 devices: replica"),
    ):
        assert_step_by_hand_agrees(TrainingSpec("mlp", 6), node)


@pytest.mark.parametrize(("granted", "right"), [(0.5, True), (0.1, False)])
def test_what_is_off_is_measured_again_before_it_is_said(granted, right) -> None:
    """More and larger perturbations grant what a few have passed over, and nothing else."""
    asked = []

    class Measure:
        def provisionally(self) -> MeasuredStep[str]:
            return self.in_full(pairs=0)

        def in_full(self, *, pairs: int, seed: int = 0, magnified: float = 1.0) -> MeasuredStep[str]:
            asked.append(pairs)
            allowed = granted if magnified > 1 else 0.01
            return MeasuredStep({"x": torch.ones(3).double()}, {"x": torch.full((3,), allowed).double()}, {"x": 1.0})

    measure: Any = Measure()
    with contextlib.nullcontext() if right else pytest.raises(GradientMismatch, match=r"1\.29|1\.3"):
        _assert_as_measured({"x": torch.tensor([1.0, 1.3, 1.0])}, measure)
    assert len(asked) == 3
    _assert_as_measured({"x": torch.ones(3)}, measure)
    assert asked[3:] == [0], "what is right is measured once, provisionally"
