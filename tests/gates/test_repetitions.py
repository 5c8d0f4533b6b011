"""Calls at the wrong time, repeated ones and random numbers: an experiment without them names the mistake."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from mgpu_check.gates.gate_arguments import Program
from tests.gates.diagnosed import mlp, regression, report, synchronize
from tests.gates.single_cases import failure
from tests.gates.steps import chunked

pytestmark = pytest.mark.gpus(2)


class Counts(nn.Module):
    """Scales by the number of calls, which a buffer counts."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.layer(x) * self.calls


def recomputes(model, batch, rank, wrong):
    """By a reentrant checkpoint; the page of the mistake has the other kind."""
    x, y = chunked(batch, rank)
    model.to(rank.device)
    forward = functools.partial(checkpoint, model, use_reentrant=True) if wrong else model
    F.mse_loss(forward(x.requires_grad_()), y).backward()
    synchronize(model, rank)


def on_one_device(model, batch):
    F.mse_loss(model(batch[0]), batch[1]).backward()


def test_a_forward_pass_that_counts_when_it_is_computed_again(ranks):
    mismatch = report(ranks, functools.partial(recomputes, wrong=True), build=Counts, reference=on_one_device)
    assert mismatch.mistakes[0] == "recomputation-differs", str(mismatch)
    assert "computes activations again in backward; if it keeps them, the step is right" in str(mismatch)
    right = functools.partial(recomputes, wrong=False)
    assert failure(ranks, Program(right, Counts, regression, on_one_device), 2, 4) is None


def blurs(model, batch, rank, on, wrong):
    """Noise is added to the mean gradient, as for differential privacy; it must be the same on all ranks."""
    torch.manual_seed(3 + rank.index * wrong)
    numbers = torch.Generator().manual_seed(3 + rank.index * wrong)
    x, y = chunked(batch, rank)
    F.mse_loss(model.to(rank.device)(x), y).backward()
    synchronize(model, rank)
    for parameter in model.parameters():
        noise = torch.randn_like(parameter) if on == "device" else torch.randn(parameter.shape, generator=numbers)
        parameter.grad += noise.to(rank.device)


@pytest.mark.slow
@pytest.mark.parametrize("on", ["host", "device"])
def test_numbers_that_all_ranks_should_draw_alike(ranks, on):
    mismatch = report(ranks, functools.partial(blurs, on=on, wrong=True))
    assert mismatch.mistakes[0] == "random-numbers-per-rank", str(mismatch)
    assert "if all ranks draw the random numbers of rank 0, the step is right" in str(mismatch)
    assert failure(ranks, Program(functools.partial(blurs, on=on, wrong=False), mlp, regression), 2, 4) is None


def leaves_too_late(model, batch, rank, wrong):
    wrapped = DistributedDataParallel(model.to(rank.device))
    x, y = chunked(batch, rank)
    for number, (part, target) in enumerate(zip(x.chunk(2), y.chunk(2), strict=True)):
        wrapped.require_backward_grad_sync = number == (0 if wrong else 1)
        F.mse_loss(wrapped(part), target).div(2).backward()


@pytest.mark.slow
def test_gradients_that_the_first_micro_batch_synchronizes(ranks):
    mismatch = report(ranks, functools.partial(leaves_too_late, wrong=True), sizes=8, reference=on_one_device)
    assert mismatch.mistakes[0] == "gradients-not-synchronized", str(mismatch)
    assert "if each backward pass synchronizes gradients" in str(mismatch)
    right = functools.partial(leaves_too_late, wrong=False)
    assert failure(ranks, Program(right, mlp, regression, on_one_device), 2, 8) is None
