"""The gate on `transformer_accumulation`, and on its broken twin."""

from __future__ import annotations

import pytest
import torch
from broken import transformer_accumulation as broken
from torch import nn
from transformer_accumulation import IGNORED, MAX_NORM, Trainer, Transformer, make_data, summed_loss, windows

from mgpu_check import ScalingMismatch, assert_step_scales

MICRO_BATCH = 4  # samples on all ranks together


def cut(batch):
    """The micro-batches of an epoch; the last may be smaller."""
    return list(zip(*(part.split(MICRO_BATCH) for part in batch), strict=True))


class Step:
    """An epoch: each rank takes its part of each micro-batch."""

    trainer_class, dtype = Trainer, torch.bfloat16

    def __init__(self, model, rank):
        self.trainer = self.trainer_class(model, rank.device, self.dtype)

    def __call__(self, model, batch, rank):
        self.trainer.run_epoch([[part[rank.index :: rank.size] for part in micro] for micro in cut(batch)])


def reference(model, batch):
    """One device, in float32, that takes each window at once."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for window in windows(cut(batch)):
        tokens, labels = (torch.cat(parts) for parts in zip(*window, strict=True))
        optimizer.zero_grad()
        (summed_loss(model(tokens), labels) / (labels != IGNORED).sum()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()


class HalfStep(Step):
    dtype = torch.float16


SETTINGS = {"build": Transformer, "batch": make_data, "reference": reference, "max_examples": 9}


@pytest.mark.parametrize("step", [Step, HalfStep])
def test_step_scales(ranks, step):
    assert_step_scales(ranks, step, **SETTINGS)


class BrokenStep(Step):
    trainer_class, dtype = broken.Trainer, torch.float32


def test_the_broken_twin_is_refuted(ranks, refuted):
    with pytest.raises(ScalingMismatch) as mismatch:
        assert_step_scales(ranks, BrokenStep, **SETTINGS)
    assert refuted("transformer_accumulation", mismatch.value) == "mean-of-means"
