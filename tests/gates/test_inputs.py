"""The gate for steps: each kind of input that it tries is there for a mistake that needs it."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.gates.steps import Training, linear, mine, passes, refuted, summed, tutorial

pytestmark = pytest.mark.gpus(4)

ONE_SIZE: dict[str, Any] = {"sizes": 4, "max_examples": 1}
"""For mistakes that no size brings up: one case of each kind of input."""


@pytest.mark.slow
def test_sizes_that_do_not_divide(ranks):
    text = refuted(ranks, tutorial, "mean-of-means", match="world size 2, samples 3, steps 1")
    assert "every 2nd sample: 2, 1" in text, text
    passes(ranks, tutorial, **ONE_SIZE)


@pytest.mark.slow
def test_sizes_below_the_world_size(ranks):
    def step(model, batch, rank):
        x, y = mine(batch, rank)
        net = DDP(model.to(rank.device))
        loss = F.cross_entropy(net(x), y, reduction="sum") if len(x) else net(batch[0][:1].to(rank.device)).sum()
        (loss * rank.size / len(batch[0])).backward()

    refuted(ranks, step, match="world size 2, samples 1,")
    passes(ranks, step, sizes=st.integers(4, 9), max_examples=1)


@pytest.mark.slow
def test_scaled_batches_reach_a_limit_on_the_norm(ranks):
    def step(model, batch, rank, late=False):
        model.to(rank.device)
        loss = (model(batch[0][rank.index :: rank.size].to(rank.device)) ** 2).sum() * rank.size / len(batch[0])
        loss.backward()
        for late_ in (False, True):
            if late_ == late:
                nn.utils.clip_grad_norm_(model.parameters(), 50.0)
            if not late_:
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= rank.size

    refuted(ranks, step, "clipped-before-synchronization", match="scaled by 1024", build=linear, **ONE_SIZE)
    passes(ranks, functools.partial(step, late=True), build=linear, **ONE_SIZE)


class Forgetful(Training):
    def __call__(self, model, batch, rank):
        if rank.size == 1:
            self.optimizer.zero_grad()
        summed(self.net, batch, rank).backward()
        self.optimizer.step()
        return {}


@pytest.mark.slow
def test_several_steps(ranks):
    report = refuted(ranks, Forgetful, "stale-gradients", match="in optimizer step 2 on rank 0", **ONE_SIZE)
    assert "steps 2" in report


def tokens(n):
    x = torch.randint(0, 11, (n, 6))
    y = torch.randint(0, 11, (n, 6))
    y[:, 4:] = -100
    return x, y


def embedding():
    return nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11))


def of_tokens(model, batch, rank, counted):
    x, y = mine(batch, rank)
    net = DDP(model.to(rank.device))
    loss = F.cross_entropy(net(x).flatten(0, 1), y.flatten(), ignore_index=-100, reduction="sum")
    count = (y != -100).sum()
    if counted:
        dist.all_reduce(count)
        loss = loss * rank.size
    (loss / count).backward()


@pytest.mark.slow
def test_uneven_padding(ranks):
    options: dict[str, Any] = {"build": embedding, "batch": tokens, **ONE_SIZE}
    uncounted = functools.partial(of_tokens, counted=False)
    refuted(ranks, uncounted, "mean-of-means", match="batch ragged", **options)
    passes(ranks, functools.partial(of_tokens, counted=True), **options)


@pytest.mark.slow
def test_sorted_batches(ranks):
    def step(model, batch, rank, split=True):
        # The largest value of the first rank's shard stands for that of all.
        x = batch[0][rank.index :: rank.size].to(rank.device)
        top = (batch[0] if not split else x)[:, 0].max() if len(x) else batch[0][0, 0]
        top = top.to(rank.device).clone()
        dist.broadcast(top, 0)
        return {"top": top}

    refuted(ranks, step, match="returned top")
    passes(ranks, functools.partial(step, split=False), **ONE_SIZE)
