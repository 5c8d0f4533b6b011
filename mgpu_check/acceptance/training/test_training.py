"""Check that GPUs of one model train to the same bits, and that several GPUs together train like one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgpu_check.acceptance.cases import OPTIMIZERS, PRECISIONS, TransformerCase
from mgpu_check.acceptance.node import Node, drawn
from mgpu_check.acceptance.training.checks import DETERMINISTIC, sized, train_alike
from mgpu_check.engine.rank_side.rank import NamedFunction
from mgpu_check.oracles.strategies import trainings
from mgpu_check.oracles.training.cases import TrainingSpec


@st.composite
def transformers(draw: st.DrawFn, precision: str) -> TransformerCase:
    """Draw cases of a precision, with the smallest sizes.
    The simplest case differs between precisions, so that one example per precision covers all variants."""
    index = PRECISIONS.index(precision)

    def either(number: int, values: tuple[object, object]) -> object:
        return draw(st.sampled_from(values if not number % 2 else values[::-1]))

    return TransformerCase(
        precision=precision,
        optimizer=str(either(index, OPTIMIZERS)),
        tied=bool(either(index // 2, (False, True))),
        dropout=bool(either((index + 1) // 2, (False, True))),
        seed=draw(st.integers(0, 999)),
    )


_DATA = st.data()
_DATA_PARALLEL, _DISTRIBUTED, _REPLICAS = (
    NamedFunction(f"mgpu_check.acceptance.training.transformer:examine_{name}")
    for name in ("data_parallel", "distributed", "replicas")
)


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
    node.in_node_process("training", _DATA_PARALLEL, training)


@drawn(quick=1, standard=10, long=100)
@given(training=trainings(("mlp", "mlp", "lenet", "convnet"), batch=st.integers(8, 24)))
def test_distributed(node: Node, training: TrainingSpec) -> None:
    """DDP on all GPUs trains like one GPU."""
    node.on_ranks("training", _DISTRIBUTED, training, environment=DETERMINISTIC)


@drawn(quick=1, standard=10, long=100)
@given(training=trainings(("mlp",), batch=st.integers(8, 24), steps=st.integers(3, 6)))
def test_replicas_stay_equal(node: Node, training: TrainingSpec) -> None:
    """DDP keeps the parameters of all GPUs equal, to the bit, through every step."""
    node.on_ranks("training", _REPLICAS, training, environment=DETERMINISTIC)
