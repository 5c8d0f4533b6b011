"""The gate on `resnet_dp`, and on its broken twin."""

from __future__ import annotations

import pytest
import torch
from broken import resnet_dp as broken
from resnet_dp import WithLoss, make_data, make_optimizer, resnet18, train_batch
from torch import nn

from mgpu_check import ScalingMismatch, assert_step_scales

SETTINGS = {
    "batch": make_data,
    "sizes": [6],  # three for each of two GPUs; two for each of three, where there are four
    "max_examples": 8,
    "single_process": True,  # one process drives all GPUs, and rank.size is their number
}


def build():
    return WithLoss(resnet18(width=4))


def on_all_gpus(train, model, batch, rank):
    replicated = nn.DataParallel(model.to("cuda:0"), device_ids=list(range(rank.size)))
    return {"loss": train(replicated, make_optimizer(model), *(part.to("cuda:0") for part in batch))}


def step(model, batch, rank):
    return on_all_gpus(train_batch, model, batch, rank)


def reference(model, batch, world_size):
    """One device that goes through the batch shard by shard: BatchNorm takes the statistics of each shard.

    Running statistics are those of the first shard, for DataParallel keeps those of the first GPU.
    """
    optimizer = make_optimizer(model)
    optimizer.zero_grad()
    before, left = buffers_of(model), None
    total = torch.zeros(())
    for shard in zip(*(part.chunk(world_size) for part in batch), strict=True):
        restore(model, before)
        loss = model(*shard).sum() / len(batch[0])
        loss.backward()
        total += loss.detach()
        left = left or buffers_of(model)
    restore(model, left)
    optimizer.step()
    return {"loss": total}


def buffers_of(model):
    return [buffer.clone() for buffer in model.buffers()]


def restore(model, values):
    for buffer, value in zip(model.buffers(), values, strict=True):
        buffer.copy_(value)


def test_step_scales(ranks):
    assert_step_scales(ranks, step, build=build, reference=reference, **SETTINGS)


def build_broken():
    return broken.WithLoss(resnet18(width=4))


def broken_step(model, batch, rank):
    return on_all_gpus(broken.train_batch, model, batch, rank)


def reference_of_broken(model, batch, world_size):
    return reference(WithLoss(model.net), batch, world_size)


def test_the_broken_twin_is_refuted(ranks, refuted):
    with pytest.raises(ScalingMismatch) as mismatch:
        assert_step_scales(ranks, broken_step, build=build_broken, reference=reference_of_broken, **SETTINGS)
    assert refuted("resnet_dp", mismatch.value) == "not-scattered"
