"""Single calls of a wrong step are changed: the change that makes it right names the mistake and the line."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mgpu_check import Rank, ScalingMismatch, assert_step_scales
from mgpu_check.diagnosis.evidence import UnfinishedCall
from mgpu_check.diagnosis.observations import KINDS
from mgpu_check.diagnosis.report import Attempts
from mgpu_check.diagnosis.rules.order import findings_of_calls
from mgpu_check.gates.gate_arguments import Program
from mgpu_check.gates.search.scenarios import Scenario
from mgpu_check.gates.search.trials import Trials
from mgpu_check.processes.collective_records import Entered
from mgpu_check.torch_hooks.collective_arguments import own_groups
from tests.gates.steps import FEW

pytestmark = pytest.mark.gpus(4)


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def batch(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n, 6), 2 * torch.randn(n, 1) + 3


def synchronize(model: nn.Module, size: int) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= size


def own(batch, rank):
    """Neighbouring samples."""
    return (part.chunk(rank.size)[rank.index].to(rank.device) for part in batch)


def trains(model, rank, x, y) -> None:
    nn.functional.mse_loss(model.to(rank.device)(x), y).backward()
    synchronize(model, rank.size)


def pairs(rank) -> list[Any]:
    return [dist.new_group([first, first + 1]) for first in range(0, rank.size, 2)] if rank.size > 1 else [None]


def centered(model, batch, rank, group):
    """Targets are centered by the mean over a group, whose statistics travel together."""
    x, y = own(batch, rank)
    statistics = torch.stack([torch.tensor(float(len(y)), device=rank.device), y.sum()])
    dist.all_reduce(statistics, group=group)
    trains(model, rank, x, y - statistics[1] / statistics[0])


def in_pairs(model, batch, rank):
    centered(model, batch, rank, pairs(rank)[rank.index // 2])


class Running(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 1)
        self.register_buffer("total", torch.zeros(6, dtype=torch.float64))


class ReducesAgain:
    def __init__(self, model, rank):
        self.model = model.to(rank.device)

    def __call__(self, model, batch, rank):
        x, y = own(batch, rank)
        model.total += x.sum(0).double()
        dist.all_reduce(model.total)  # what was reduced before is still in it
        model.zero_grad()
        trains(model.layer, rank, x, y)


def named(ranks, step, of=build, **options) -> ScalingMismatch:
    with pytest.raises(ScalingMismatch) as caught:
        assert_step_scales(
            ranks, step, **{**FEW, "build": of, "batch": batch, "sizes": 8, "max_examples": 1, **options}
        )
    return caught.value


def holds(ranks, program: Program) -> bool:
    trials = Trials(ranks, program, frozenset(KINDS), None, "right")
    return trials.run(Scenario(2, 4)) is None and trials.completed[2, ()] == 1


def test_a_collective_in_the_wrong_group(ranks):
    found = named(ranks, in_pairs, world_sizes=[4])
    assert found.mistakes[0] == "wrong-process-group"
    assert "runs over ranks 0-1, ranks 2-3; over ranks 0-3 the step is right" in str(found)
    assert "test_experiments.py:" in str(found)


def centered_in_pairs(model, batch, rank):
    """The world is right on two ranks only; the code has groups of two, but does not use them."""
    pairs(rank)
    centered(model, batch, rank, None)


def pairs_alone(model, batch, world_size):
    x, y = batch
    y = torch.cat([part - part.mean() for part in y.chunk(max(1, world_size // 2))])
    nn.functional.mse_loss(model(x), y).backward()


@pytest.mark.slow
def test_a_collective_belongs_into_groups_that_ranks_make_one_after_the_other(ranks):
    found = named(ranks, centered_in_pairs, world_sizes=[4], reference=pairs_alone)
    assert found.mistakes[0] == "wrong-process-group", str(found)
    assert "runs over ranks 0-3; over ranks 0-1, ranks 2-3 the step is right" in str(found)


def test_groups_of_other_ranks_are_not_among_those_of_a_rank(ranks):
    def groups(rank):
        for other in range(rank.size):
            dist.new_group([other])
        return [dist.get_process_group_ranks(group) for group in own_groups()]

    assert ranks.run(groups, size=2) == [[[0, 1], [0]], [[0, 1], [1]]]


@pytest.mark.slow
def test_what_was_reduced_before_is_reduced_again(ranks):
    found = named(ranks, ReducesAgain, of=Running)
    assert found.mistakes[0] == "reduced-again"
    assert "with only new values reduced each time, the step is right" in str(found)


def test_a_wrong_step_that_no_change_puts_right_is_named_by_none(ranks):
    def step(model, batch, rank):
        centered(model, batch, rank, None)
        if rank.size > 1:
            for parameter in model.parameters():
                parameter.grad += 0.1 * torch.linspace(1, 2, parameter.numel(), device=rank.device).view_as(parameter)

    found = named(ranks, step)
    assert "the step is right" not in str(found)


def waiting(name: str, number: int, options: str, group: str = "") -> Entered:
    return Entered(name, number, "", group, "float32[2]", options, "", "train.py", 7, "inside")


def test_a_group_whose_member_waits_for_a_message_is_too_wide():
    calls = UnfinishedCall(
        2, 4, "ranks 0-1 did not finish", hung="ranks 0-1 did not finish", last={1: waiting("all_reduce", 1, "sum")}
    )
    waits = {0: waiting("recv", 0, "src=1")}
    wide = UnfinishedCall(**{**vars(calls), "messages": waits})
    assert [finding.mistake for finding in findings_of_calls(wide, 1, Attempts())] == ["wrong-process-group"]
    other = UnfinishedCall(**{**vars(calls), "messages": {0: waiting("recv", 0, "src=3")}})
    assert "wrong-process-group" not in [finding.mistake for finding in findings_of_calls(other, 2, Attempts())]


# Each change makes a planted mistake right; the twin passes.


def reduced(value: torch.Tensor, rank: Rank, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
    dist.all_reduce(value, op)
    return value


def scaled_by(model, batch, rank, scale) -> None:
    """Targets are divided by a number that depends on all samples."""
    x, y = own(batch, rank)
    trains(model, rank, x, y / scale(y))


def by_a_sum_for_a_maximum(model, batch, rank, wrong):
    op = dist.ReduceOp.SUM if wrong else dist.ReduceOp.MAX
    scaled_by(model, batch, rank, lambda y: reduced(y.abs().max(), rank, op))


def by_a_mean_for_a_sum(model, batch, rank, wrong):
    scaled_by(model, batch, rank, lambda y: 1 + reduced(y.abs().sum(), rank) / (rank.size if wrong else 1))


def by_a_sum_for_a_mean(model, batch, rank, wrong):
    scaled_by(model, batch, rank, lambda y: 1 + reduced(y.abs().mean(), rank) / (1 if wrong else rank.size))


def by_its_own_number(model, batch, rank, wrong):
    """Each rank's samples are weighed by where they are in the batch; that is each rank's own."""
    x, y = own(batch, rank)
    first = torch.tensor(float(rank.index * len(x)), device=rank.device)
    if wrong:
        dist.all_reduce(first)
    weights = (torch.linspace(0, len(x) - 1, len(x), device=rank.device) + first).sin().unsqueeze(1)
    nn.functional.mse_loss(weights * model.to(rank.device)(x), y).backward()
    synchronize(model, rank.size)


def by_pieces(model, batch, rank, wrong):
    """All rows are compared with all; the first half of them are of another kind."""
    x, y = own(batch, rank)
    made = model.to(rank.device)(x)
    both = [made, y]
    if wrong:
        both = [torch.cat(both)]
    whole = []
    for one in both:
        parts = [torch.empty_like(one) for _ in range(rank.size)]
        dist.all_gather(parts, one.detach())
        whole += parts
    all_made, all_wanted = torch.cat(whole).chunk(2)
    (made * (all_wanted - all_made).flip(0).chunk(rank.size)[rank.index]).mean().backward()
    synchronize(model, rank.size)


@pytest.mark.parametrize(
    ("program", "mistake", "evidence"),
    [
        (by_a_sum_for_a_maximum, "wrong-reduction", "with MAX makes the step right"),
        (by_a_mean_for_a_sum, "world-size-factor", "multiplied by 2, the size of its group, the step is right"),
        pytest.param(
            *(by_a_sum_for_a_mean, "world-size-factor", "divided by 2, the size of its group, the step is right"),
            marks=pytest.mark.slow,
        ),
        pytest.param(by_its_own_number, "wrong-reduction", "each rank needs its own value", marks=pytest.mark.slow),
        pytest.param(
            *(by_pieces, "gathered-in-other-order"),
            "with the rows of each rank in 2 pieces, and the first pieces of all ranks",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_change_that_makes_a_step_right_names_its_mistake(ranks, program, mistake, evidence):
    found = named(ranks, functools.partial(program, wrong=True))
    assert found.mistakes[0] == mistake, str(found)
    assert evidence in str(found)
    assert holds(ranks, Program(functools.partial(program, wrong=False), build, batch))


def projection() -> nn.Module:
    return nn.Linear(6, 3)


def contrasts(model, batch, rank, wrong):
    """Each sample must find its own key among those of all samples; targets continue from rank to rank."""
    x, _ = own(batch, rank)
    keys = [x[:, :3].contiguous(), x[:, 3:].contiguous()]
    candidates = []
    for key in [torch.cat(keys)] if wrong else keys:
        parts = [torch.empty_like(key) for _ in range(rank.size)]
        dist.all_gather(parts, key)
        candidates += parts
    targets = torch.arange(len(x), device=rank.device) + rank.index * len(x)
    nn.functional.cross_entropy(model.to(rank.device)(x) @ torch.cat(candidates).T, targets).backward()
    synchronize(model, rank.size)


def test_targets_that_go_on_from_rank_to_rank_do_not_restart(ranks):
    found = named(ranks, functools.partial(contrasts, wrong=True), of=projection)
    assert found.mistakes[0] == "gathered-in-other-order", str(found)
    assert "with the rows of each rank in 2 pieces, and the first pieces of all ranks" in str(found)
    assert holds(ranks, Program(functools.partial(contrasts, wrong=False), projection, batch))
