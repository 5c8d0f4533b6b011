"""The gate on `mlp_ddp`, and on its broken twin."""

from __future__ import annotations

import pytest
from broken import mlp_ddp as broken
from mlp_ddp import Trainer, build, make_data

from mgpu_check import ScalingMismatch, assert_step_scales


class Step:
    """Each rank trains on its part of the global batch."""

    trainer_class = Trainer

    def __init__(self, model, rank):
        self.trainer = self.trainer_class(model, rank.device)

    def __call__(self, model, batch, rank):
        inputs, labels = (part[rank.index :: rank.size] for part in batch)
        return {"loss": self.trainer.run_batch(inputs, labels)}


def test_step_scales(ranks):
    # The loader drops the last, incomplete batch: all ranks have equally many samples.
    assert_step_scales(ranks, Step, build=build, batch=make_data, sizes="divisible", max_examples=12)


class BrokenStep(Step):
    trainer_class = broken.Trainer


def test_the_broken_twin_is_refuted(ranks, refuted):
    with pytest.raises(ScalingMismatch) as mismatch:
        assert_step_scales(ranks, BrokenStep, build=build, batch=make_data, sizes="divisible", max_examples=12)
    assert refuted("mlp_ddp", mismatch.value) == "gradients-not-synchronized"
