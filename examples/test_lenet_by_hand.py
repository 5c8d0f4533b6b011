"""The gate on `lenet_by_hand`, and on its broken twin."""

from __future__ import annotations

import pytest
from broken import lenet_by_hand as broken
from lenet_by_hand import make_data, make_parameters, train_batch
from torch import nn

from mgpu_check import ScalingMismatch, assert_step_scales


def build():
    return nn.ParameterDict(make_parameters())


def trained(train, model, batch, rank):
    p = dict(model.to(rank.device).items())  # as `replicate` makes them, but where the gate looks
    images, labels = (part.to(rank.device) for part in batch)
    train(p, images[rank.index :: rank.size], labels[rank.index :: rank.size], len(images))


def step(model, batch, rank):
    trained(train_batch, model, batch, rank)


def test_step_scales(ranks):
    # Any batch size will do, also one below the world size: some parts are empty then.
    assert_step_scales(ranks, step, build=build, batch=make_data, max_examples=12)


def broken_step(model, batch, rank):
    trained(broken.train_batch, model, batch, rank)


def test_the_broken_twin_is_refuted(ranks, refuted):
    with pytest.raises(ScalingMismatch) as mismatch:
        assert_step_scales(ranks, broken_step, build=build, batch=make_data, max_examples=12)
    assert refuted("lenet_by_hand", mismatch.value) == "world-size-factor"
