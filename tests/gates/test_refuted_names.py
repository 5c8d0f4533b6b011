"""A mistake whose evidence also holds in a right program is not named; the same mistake is named where it is one."""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from mgpu_check import assert_metric_scales
from mgpu_check.gates.gate_arguments import Program
from mgpu_check.gates.run.draws import redrawing
from mgpu_check.gates.search.scenarios import Scenario
from tests.gates import diagnosed
from tests.gates.diagnosed import backward, mlp, part, regression, synchronize
from tests.gates.single_cases import failures

pytestmark = pytest.mark.gpus(2)

report = functools.partial(diagnosed.report, max_examples=2)


def line_of(function: Any, text: str) -> str:
    """The line of a function that contains a text, as a report names it."""
    lines = Path(__file__).read_text().splitlines()
    first = function.__code__.co_firstlineno
    number = next(number for number, line in enumerate(lines[first - 1 :], first) if text in line)
    return f"tests/gates/{Path(__file__).name}:{number}"


def mine(batch, rank):
    return tuple(leaf.to(rank.device) for leaf in part(batch, rank))


# Asynchronous collectives


def waits_by(how: str, model, batch, rank):
    """A gradient that is summed instead of averaged, beside an asynchronous collective that is waited for."""
    backward(model.to(rank.device), mine(batch, rank))
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    total = torch.ones(3, device=rank.device)
    work = dist.all_reduce(total, async_op=True)
    if how == "future":
        work.get_future().wait()
    elif how == "device":
        torch.cuda.synchronize()
    elif how == "poll":
        while not work.is_completed():
            pass
    else:
        work.wait()
    if how == "unseeded":
        torch.manual_seed(random.SystemRandom().getrandbits(32))
        torch.rand(3)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["unseeded", "future", "device", "poll"])
def test_a_collective_that_is_waited_for_is_not_blamed(ranks, how):
    found = report(ranks, functools.partial(waits_by, how))
    assert found.mistakes[0] == "world-size-factor", str(found)
    assert "not-waited" not in found.mistakes


def forgets_one_wait(model, batch, rank):
    backward(model.to(rank.device), mine(batch, rank))
    first, *others = (parameter.grad for parameter in model.parameters())
    dist.all_reduce(first, async_op=True).wait()
    works = [dist.all_reduce(one, async_op=True) for one in others]  # read before the wait
    for one in (first, *others):
        one.copy_(one / rank.size)
    for work in works:
        work.wait()


@pytest.mark.slow
def test_a_collective_is_blamed_if_waiting_for_it_makes_the_step_right(ranks):
    found = report(ranks, forgets_one_wait)
    assert found.mistakes[0] == "not-waited" and found.site == line_of(forgets_one_wait, "# read before"), str(found)


# Random numbers


class DrawsBeside:
    """Draws numbers on ranks that no result depends on, and keeps the gradients of each rank."""

    def __init__(self, model, rank, wrong=True):
        torch.manual_seed(7 + rank.index)
        if rank.size > 1:
            torch.rand(2 + rank.index)
        self.wrong = wrong

    def __call__(self, model, batch, rank):
        torch.rand(len(batch[0]) // rank.size)
        backward(model.to(rank.device), mine(batch, rank))
        if not self.wrong:
            synchronize(model, rank)


@pytest.mark.slow
def test_random_numbers_that_no_result_depends_on_are_not_blamed(ranks):
    found = report(ranks, DrawsBeside, world_sizes=None, meshes=[{"dp": 1, "cp": 2}])
    assert found.mistakes == ("gradients-not-synchronized",), str(found)
    assert "do: all-reduce gradient of 0.weight, gradient of 0.bias and 2 more over cp after backward" in str(found)
    step = functools.partial(DrawsBeside, wrong=False)
    assert failures(ranks, Program(step, mlp, regression), Scenario(2, 4)) == []


def test_redrawn_numbers_follow_from_the_same_seeds():
    def drawn() -> tuple[Any, ...]:
        random.seed(5)
        own, of_torch = random.Random(6), torch.Generator().manual_seed(7)
        values = torch.rand(3, generator=of_torch), torch.empty(3).normal_(generator=of_torch)
        return (random.random(), own.random(), *(tuple(value.tolist()) for value in values))

    def again(times: int) -> tuple[Any, ...]:
        with redrawing(times):
            return drawn()

    several = [drawn(), again(1), again(2)]
    assert again(1) == several[1] and drawn() == several[0]
    assert all(len(set(numbers)) == 3 for numbers in zip(*several, strict=True))


# Numbers of optimizer steps


def steps_by_hand(model, batch, rank):
    """Updates the parameters without an optimizer, by a rate that is 1.3 times too large."""
    backward(model.to(rank.device), mine(batch, rank))
    synchronize(model, rank)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.13 * parameter.grad


def steps_by_sgd(model, batch):
    backward(model, batch)
    torch.optim.SGD(model.parameters(), lr=0.1).step()


@pytest.mark.slow
def test_an_update_by_hand_is_no_step_that_is_left_out(ranks):
    found = report(ranks, steps_by_hand, reference=steps_by_sgd)
    assert "decision-per-rank" not in found.mistakes, str(found)
    assert "which rank 0 does not do" not in str(found)


def skips_all(model, batch, rank):
    backward(model.to(rank.device), mine(batch, rank))
    synchronize(model, rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(1 if rank.size > 1 else 2):
        optimizer.step()


@pytest.mark.slow
def test_steps_that_are_left_out_are_named_if_they_explain_the_parameters(ranks):
    found = report(ranks, skips_all)
    assert found.mistakes[0] == "decision-per-rank", str(found)
    assert "has stepped 1 times on 2 ranks, 2 times on one device" in str(found)


# Metrics, which are few numbers


def data(n: int) -> Any:
    """The first samples of fixed data: no seed changes them."""
    generator = torch.Generator().manual_seed(7)
    return torch.randn(64, 4, generator=generator)[:n], torch.randint(3, (64,), generator=generator)[:n]


def classifier() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 3)


def shares(model, batch, rank, blocks):
    x, y = (
        (leaf.tensor_split(rank.size)[rank.index] if blocks else leaf[rank.index :: rank.size]).to(rank.device)
        for leaf in batch
    )
    share = (model.to(rank.device)(x).argmax(1) == y).float().mean()
    dist.all_reduce(share)
    return {"share": share / rank.size}


@pytest.mark.slow
@pytest.mark.parametrize(("blocks", "parts"), [(False, "every 2nd sample"), (True, "blocks of samples")])
def test_a_metric_of_three_samples_is_explained_in_other_cases_too(ranks, blocks, parts):
    step = functools.partial(shares, blocks=blocks)
    found = report(ranks, step, gate=assert_metric_scales, build=classifier, batch=data, sizes=3)
    assert found.mistakes == ("mean-of-means",), str(found)
    assert f"({parts}: 2, 1)" in str(found)


# Clipping after gradients that were not synchronized


def synchronizes_too_early(model, batch, rank):
    optimizer = torch.optim.SGD(model.to(rank.device).parameters(), lr=0.1)
    x, y = (leaf.chunk(2) for leaf in mine(batch, rank))
    for number in range(2):
        (F.mse_loss(model(x[number]), y[number]) / 2).backward()  # the second one is not synchronized
        if number == 0 or rank.size == 1:
            synchronize(model, rank)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


@pytest.mark.slow
def test_gradients_that_are_clipped_as_backward_left_them_point_at_the_backward_pass(ranks):
    found = report(ranks, synchronizes_too_early, sizes=8)
    assert found.mistakes[0] == "gradients-not-synchronized", str(found)
    assert f"ranks first part at {line_of(synchronizes_too_early, '# the second')}, in backward" in str(found)
