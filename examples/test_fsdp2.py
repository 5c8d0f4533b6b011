"""The gate on `fsdp2`, and on its broken twin."""

from __future__ import annotations

import pytest
from broken import fsdp2 as broken
from fsdp2 import Trainer, build, make_data

from mgpu_check import ScalingMismatch, assert_step_scales


class Step:
    """Each rank trains on its part of the global batch. The gate sees the whole tensors of sharded parameters."""

    trainer_class = Trainer

    def __init__(self, model, rank):
        self.trainer = self.trainer_class(model, rank.device)

    def __call__(self, model, batch, rank):
        self.trainer.run_batch(*(part.chunk(rank.size)[rank.index] for part in batch))


def test_step_scales(ranks):
    assert_step_scales(ranks, Step, build=build, batch=make_data, sizes="divisible", max_examples=9)


class BrokenStep(Step):
    trainer_class = broken.Trainer


def test_the_broken_twin_is_refuted(ranks, refuted):
    with pytest.raises(ScalingMismatch) as mismatch:
        assert_step_scales(ranks, BrokenStep, build=build, batch=make_data, sizes="divisible", max_examples=9)
    assert refuted("fsdp2", mismatch.value) == "wrong-process-group"
