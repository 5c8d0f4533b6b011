"""A space of options: right steps agree in all of it, and a failure is shrunk to the options that it takes."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from mgpu_check import ScalingMismatch, assert_configurations_agree
from tests.gates.diagnosed import synchronize

SPACE = {"recompute": [False, True], "accumulate": [1, 2]}


def build():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def batch(n):
    return torch.randn(n, 4), torch.randn(n, 1)


def step(model, batch, rank, recompute, accumulate, mistake=False):
    x, y = (part.chunk(rank.size)[rank.index].to(rank.device) for part in batch)
    model.to(rank.device)
    count = 1 if mistake and recompute and accumulate > 1 else accumulate
    for rows, targets in zip(x.chunk(accumulate), y.chunk(accumulate), strict=True):
        output = checkpoint(model, rows, use_reentrant=False) if recompute else model(rows)
        (F.mse_loss(output, targets) / count).backward()
    synchronize(model, rank)


def agree(ranks, step=step, **options):
    arguments: dict[str, Any] = {"space": SPACE, "on": lambda **_: 2} | options
    assert_configurations_agree(ranks, step, build=build, batch=batch, sizes=[8], max_examples=1, **arguments)


@pytest.mark.slow  # the valid part agrees each day, below
def test_a_right_step_agrees_in_the_whole_space(ranks):
    agree(ranks, on=lambda accumulate, **_: {"dp": 2 if accumulate == 1 else 4})


@pytest.mark.slow
def test_a_failure_is_shrunk_to_the_options_that_it_takes(ranks):
    with pytest.raises(ScalingMismatch) as caught:
        agree(ranks, functools.partial(step, mistake=True))
    assert "fails with recompute=True, accumulate=2; agrees with accumulate=2, and with recompute=True" in str(
        caught.value
    )
    assert "recompute=True, accumulate=2 differs from the others" in str(caught.value)
    assert caught.value.mistakes[0] == "accumulation-factor"  # both sides have two ranks


def test_what_is_not_valid_does_not_run(ranks):
    suits = {"valid": lambda recompute, accumulate: not (recompute and accumulate > 1)}
    agree(ranks, functools.partial(step, mistake=True), **suits)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"space": {}}, "space={}; give a mapping from options to values"),
        ({"space": {"tp": [1]}}, "space has 'tp': [1]; give a mapping"),
        ({"valid": lambda **_: False}, "valid is False for the first value of each option, recompute=False"),
        ({"valid": lambda recompute, accumulate: (recompute, accumulate) == (False, 1)},
         "valid leaves the first value of each option alone"),
    ],
)  # fmt: skip
def test_wrong_arguments(ranks, options, message):
    with pytest.raises(ValueError, match="assert_configurations_agree") as caught:
        agree(ranks, **options)
    assert message in str(caught.value)
