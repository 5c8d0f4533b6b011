"""Gradients: a step on several devices or ranks gives the same result as on one device.

The gradients of the last step and the parameters after it are compared. The reference is float64 on one device, and the
tolerance is measured on each example; see `mgpu_check.numerics.steps`.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgpu_check import strategies
from mgpu_check.engine.rank_side.rank import NamedFunction
from mgpu_check.oracles.strategies import examples, trainings
from mgpu_check.oracles.training.cases import TrainingSpec
from mgpu_check.plugin.ranks import Gpus, Ranks

CHECKS = "mgpu_check.oracles.training.training_steps"

DISTRIBUTED = "mgpu_check.oracles.training.training_steps:assert_distributed_agrees"
# LeNet takes ten times as long as the MLP, so it is drawn less often.
PLAIN = ("mlp", "mlp", "mlp", "mlp", "mlp", "lenet")
NORMED_STEPS = st.integers(1, 2)
# The first sizes are not divisible by two, three or four devices.
UNEVEN = st.sampled_from((5, 7, 11, 13)) | st.integers(2, 16)


@st.composite
def in_buckets(draw: st.DrawFn) -> tuple[TrainingSpec, bool]:
    """Draw a training, and whether DDP has small buckets: three times in four, and then with two steps or more.
    The first step of DDP always has one bucket, so small buckets need a second step."""
    small = draw(st.sampled_from((False, True, True, True)))
    return draw(trainings(PLAIN, steps=st.integers(2, 3) if small else None)), small


@examples(30, quick=4)
@given(devices=strategies.device_counts(), training=trainings(PLAIN))
def test_data_parallel(gpus: Gpus, devices: int, training: TrainingSpec) -> None:
    """`nn.DataParallel` and one device agree in gradients and parameters, for even and uneven batches."""
    NamedFunction(f"{CHECKS}:assert_data_parallel_agrees")(training, gpus[:devices])


@examples(24, quick=4)
@given(devices=strategies.device_counts(), training=trainings(("mlp", "lenet")))
def test_step_by_hand(gpus: Gpus, devices: int, training: TrainingSpec) -> None:
    """A step by hand (loss summed per shard, gradients added up, SGD on bare parameters) agrees with one device."""
    NamedFunction(f"{CHECKS}:assert_step_by_hand_agrees")(training, gpus[:devices])


@examples(30, quick=4)
@given(size=strategies.world_sizes(), training=in_buckets(), view=st.booleans())
def test_distributed_data_parallel(ranks: Ranks, size: int, training: tuple[TrainingSpec, bool], view: bool) -> None:
    """DDP and one device agree for even and uneven batches, empty shards, one bucket and several."""
    spec, small = training
    ranks.run(DISTRIBUTED, spec, size=size, gradient_as_bucket_view=view, bucket_cap_mb=0.001 if small else None)


@examples(30, quick=4)
@given(size=strategies.world_sizes(), training=trainings(("mlp",), batch=st.integers(2, 24), windows=st.integers(2, 4)))
def test_gradient_accumulation(ranks: Ranks, size: int, training: TrainingSpec) -> None:
    """Gradients accumulated over micro-batches, with `no_sync` for all but the last, match those of the whole batch."""
    ranks.run(DISTRIBUTED, training, size=size)


@pytest.mark.gpus(least=2)
@examples(30, quick=4)
@given(size=strategies.world_sizes(least=2), training=trainings(("mlp",), steps=st.integers(1, 5)))
def test_replicas_stay_equal(ranks: Ranks, size: int, training: TrainingSpec) -> None:
    """DDP gives all ranks rank 0's parameters, and keeps them equal bit for bit through every step."""
    ranks.run("mgpu_check.oracles.training.training_steps:assert_distributed_replicas_agree", training, size=size)


@examples(24, quick=4)
@given(devices=strategies.device_counts(), training=trainings(("convnet",), batch=UNEVEN, steps=NORMED_STEPS))
def test_batchnorm_in_data_parallel(gpus: Gpus, devices: int, training: TrainingSpec) -> None:
    """BatchNorm in DataParallel normalises shard by shard, and keeps the statistics of the first device only."""
    NamedFunction(f"{CHECKS}:assert_data_parallel_agrees")(training, gpus[:devices])


@examples(24, quick=4)
@given(
    size=strategies.world_sizes(), training=trainings(("convnet",), batch=st.integers(4, 16), steps=st.integers(1, 3))
)
def test_batchnorm_in_distributed_data_parallel(ranks: Ranks, size: int, training: TrainingSpec) -> None:
    """BatchNorm in DDP normalises shard by shard; each rank starts a step from rank 0's statistics and adds its own."""
    ranks.run(DISTRIBUTED, training, size=min(size, training.batch))


@examples(20, quick=4)
@given(size=strategies.world_sizes(), training=trainings(("convnet",), steps=NORMED_STEPS))
def test_batchnorm_in_evaluation(ranks: Ranks, size: int, training: TrainingSpec) -> None:
    """With BatchNorm in evaluation mode, DDP agrees with one device on the whole batch, and keeps the statistics."""
    ranks.run(DISTRIBUTED, training, size=size, evaluation=True)


@pytest.mark.gpus(least=2)
@examples(3, quick=1)
@given(
    devices=strategies.device_counts(least=2),
    training=trainings(("resnet18",), batch=st.sampled_from((4, 8, 6)), steps=st.just(1)),
)
def test_resnet18_in_data_parallel(gpus: Gpus, devices: int, training: TrainingSpec) -> None:
    """A ResNet-18 with BatchNorm in DataParallel agrees with one device that goes through the batch shard by shard."""
    from mgpu_check.oracles.training.training_steps import assert_data_parallel_agrees

    # The last block has few pixels, and one sample of them is too little for statistics, so all shards have the same
    # size.
    even = max(count for count in range(1, devices + 1) if training.batch % count == 0)
    assert_data_parallel_agrees(training, gpus[:even])


@pytest.mark.gpus(least=2)
@examples(3, quick=1)
@given(
    size=strategies.world_sizes(least=2), training=trainings(("resnet18",), batch=st.integers(4, 9), steps=NORMED_STEPS)
)
def test_resnet18_in_distributed_data_parallel(ranks: Ranks, size: int, training: TrainingSpec) -> None:
    """A ResNet-18 with BatchNorm in DDP agrees with one device that goes through the batch shard by shard."""
    ranks.run(DISTRIBUTED, training, size=min(size, training.batch // 2))
