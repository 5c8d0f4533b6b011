"""Check that GPUs of one model train to the same bits, and that several GPUs together train like one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgpu_check.acceptance.levels import drawn
from mgpu_check.acceptance.training.cases import PRECISIONS, TransformerCase
from mgpu_check.acceptance.training.checks import DETERMINISTIC, sized, train_alike
from mgpu_check.acceptance.training.strategies import transformers
from mgpu_check.suite.gradients.cases import TrainingSpec
from mgpu_check.suite.gradients.strategies import trainings

if TYPE_CHECKING:
    import torch

    from mgpu_check.acceptance.node import Node
    from mgpu_check.engine.rank_side.rank import Rank

_DATA = st.data()


@pytest.mark.parametrize("precision", PRECISIONS)
@drawn(quick=1, standard=4, long=20)
@given(data=_DATA)
def test_gpus_train_alike(node: Node, precision: str, data: st.DataObject) -> None:
    """GPUs that start from the same bits and use deterministic algorithms have the same bits after each step."""
    case: TransformerCase = data.draw(transformers(precision))
    train_alike(node, sized(node, case))


@drawn(quick=1, standard=10, long=100)
@given(training=trainings(("mlp", "mlp", "lenet", "convnet"), batch=st.integers(8, 24)))
def test_data_parallel(node: Node, training: TrainingSpec) -> None:
    """DataParallel on all GPUs of a host trains like one of them."""
    node.in_node_process("training", _data_parallel, training)


@drawn(quick=1, standard=10, long=100)
@given(training=trainings(("mlp", "mlp", "lenet", "convnet"), batch=st.integers(8, 24)))
def test_distributed(node: Node, training: TrainingSpec) -> None:
    """DDP on all GPUs trains like one GPU."""
    node.on_ranks("training", _distributed, training, environment=DETERMINISTIC)


@drawn(quick=1, standard=10, long=100)
@given(training=trainings(("mlp",), batch=st.integers(8, 24), steps=st.integers(3, 6)))
def test_replicas_stay_equal(node: Node, training: TrainingSpec) -> None:
    """DDP keeps the parameters of all GPUs equal, to the bit, through every step."""
    node.on_ranks("training", _replicas, training, environment=DETERMINISTIC)


def _data_parallel(devices: list[torch.device], training: TrainingSpec) -> list[Any]:
    from mgpu_check.acceptance.training.parallel import examine_data_parallel

    return [*examine_data_parallel(devices, training)]


def _distributed(rank: Rank, training: TrainingSpec) -> list[Any]:
    from mgpu_check.acceptance.training.parallel import examine_distributed

    return [*examine_distributed(rank, training)]


def _replicas(rank: Rank, training: TrainingSpec) -> list[Any]:
    from mgpu_check.acceptance.training.parallel import examine_replicas

    return [*examine_replicas(rank, training)]
