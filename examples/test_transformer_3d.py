"""The gate on `transformer_3d`, and on its broken twin."""

from __future__ import annotations

import pytest
from broken import transformer_3d as broken
from transformer_3d import Trainer, build, make_data

from mgpu_check import ScalingMismatch, assert_step_scales


class Step:
    """Replicas divide the global batch. The gate puts stages and shards together."""

    trainer_class = Trainer

    def __init__(self, model, rank):
        self.trainer = self.trainer_class(model, rank.mesh, rank.device)

    def __call__(self, model, batch, rank):
        parts = (part.chunk(self.trainer.replicas)[self.trainer.replica] for part in batch)
        return {"loss": self.trainer.run_batch(*parts)}


MESHES = [{"dp": 2, "tp": 2}, {"pp": 2, "tp": 2}, {"dp": 2, "pp": 2}, {"dp": 2, "pp": 2, "tp": 2}]
# Each replica has two micro-batches of equally many samples.
SETTINGS = {"build": build, "batch": make_data, "sizes": [4, 8], "returned_by": "last", "max_examples": 6}


def fitting(ranks):
    """Return the meshes that fit the number of GPUs: the last needs eight."""
    return MESHES if ranks.size >= 8 else MESHES[:-1]


def test_step_scales(ranks):
    assert_step_scales(ranks, Step, meshes=fitting(ranks), **SETTINGS)


class BrokenStep(Step):
    trainer_class = broken.Trainer


def test_the_broken_twin_is_refuted(ranks, refuted):
    with pytest.raises(ScalingMismatch) as mismatch:
        assert_step_scales(ranks, BrokenStep, meshes=[{"dp": 2, "tp": 2}], **SETTINGS)
    assert "fails when tp > 1" in str(mismatch.value)
    refuted("transformer_3d", mismatch.value)
