"""Collectives that a rank has not matched are found after their step: on DDP, FSDP2, DTensor and subgroups."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from mgpu_check import ScalingMismatch, assert_resume_continues, assert_step_scales
from mgpu_check.gates.gate_arguments import Program
from mgpu_check.gates.search.scenarios import Scenario
from tests.gates.agreed import Mlp, Replicated, batch
from tests.gates.single_cases import failures

pytestmark = pytest.mark.gpus(4)


def reference(model: nn.Module, batch: Any) -> None:
    model.zero_grad()
    nn.functional.mse_loss(model(batch[0]), batch[1]).backward()
    torch.optim.SGD(model.parameters(), lr=0.01).step()


class Step(Replicated):
    """One step of training; what a subclass does after it is what the tests are about."""

    kind = torch.optim.SGD
    odd = False
    """Return whether rank 1 does more, or less, than the others."""

    def __call__(self, model: nn.Module, batch: Any, rank: Any) -> None:
        super().__call__(model, batch, rank)
        if rank.size > 1:
            self.after(torch.ones(1, device=rank.device), rank, self.odd and rank.index == 1)

    def after(self, one: torch.Tensor, rank: Any, odd: bool) -> None:
        pass


class Ddp(Step):
    """The others would pair it with one of the next step."""

    def after(self, one: torch.Tensor, rank: Any, odd: bool) -> None:
        for _ in range(1 + odd):
            dist.all_reduce(one, async_op=odd)


class Fsdp(Step):
    """The gate gathers parameters just after: the others would pair it with that."""

    def divided(self, model: nn.Module) -> nn.Module:
        for layer in (model.up, model.down):
            fully_shard(layer)  # type: ignore[arg-type]  # `up` is a Module to mypy
        return fully_shard(model)  # type: ignore[return-value]

    def after(self, one: torch.Tensor, rank: Any, odd: bool) -> None:
        if odd:
            self.model.up.unshard()  # type: ignore[union-attr, operator]  # `fully_shard` has added it
            self.model.up.reshard()  # type: ignore[union-attr, operator]  # as above


class Dtensor(Step):
    def after(self, one: torch.Tensor, rank: Any, odd: bool) -> None:
        mesh = init_device_mesh("cuda", (rank.size,))
        spread = distribute_tensor(torch.ones(8, device=rank.device), mesh, [Shard(0)])
        if not odd:
            spread.redistribute(placements=[Replicate()]).to_local().sum().item()


class Subgroups(Step):
    """Each group has its own number of collectives, one group gets none from ranks 2 and 3, and a wait comes
    late."""

    def __init__(self, model: nn.Module, rank: Any) -> None:
        super().__init__(model, rank)
        self.mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("dp", "tp"))
        self.first = dist.new_group([0, 1])
        self.work: dist.Work | None = None

    def after(self, one: torch.Tensor, rank: Any, odd: bool) -> None:
        if self.work is not None:
            self.work.wait()
        if rank.index < 2:
            dist.broadcast(one, 0, group=self.first)
        for _ in range(1 + rank.index // 2 + odd):
            dist.all_reduce(one, group=self.mesh["tp"].get_group())
        self.late = one.clone()
        self.work = dist.all_reduce(self.late, async_op=True)


STEPS: dict[type[Step], str] = {
    Ddp: "rank 1 made 4: all_reduce #4",
    Fsdp: "rank 1 made 7: all_gather",
    Dtensor: "ranks 0, 2-3 made",
    Subgroups: "rank 0 made 1 collective in group mesh_tp of ranks 0-1 by the end of step 1, rank 1 made 2: "
    "all_reduce #2",
}


@pytest.mark.parametrize("step", STEPS)
def test_a_collective_that_others_do_not_match_is_named(ranks, step):
    wrong = type("Wrong", (step,), {"odd": True})
    with pytest.raises(ScalingMismatch) as info:
        assert_step_scales(ranks, wrong, build=Mlp, batch=batch, reference=reference, sizes=4, world_sizes=[4])
    headline = str(info.value).splitlines()[0]
    assert STEPS[step] in headline and "by the end of step 1" in headline and "is not matched on" in headline
    assert info.value.mistakes == ("decision-per-rank",)


@pytest.mark.parametrize("step", STEPS)
def test_ranks_that_call_alike_are_not_accused(ranks, step):
    assert failures(ranks, Program(step, Mlp, batch, reference), Scenario(4, 4, steps=2)) == []


class Experts(nn.Module):
    """Of a mixture of experts: a rank calls those that its samples choose, or all of them."""

    call_all = False

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 8)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = x
        for number, expert in enumerate(self.experts):
            rows = (x[:, 0] > 0).long().eq(number).nonzero().squeeze(1)
            if self.call_all or len(rows):
                out = out.index_add(0, rows, expert(x[rows]))
        return self.router(out)


class Mixture(Step):
    def divided(self, model: nn.Module) -> nn.Module:
        for expert in model.experts.children():  # type: ignore[union-attr]
            fully_shard(expert)
        return fully_shard(model)  # type: ignore[return-value]


@pytest.mark.slow
@pytest.mark.parametrize("call_all", [False, True])
def test_a_gradient_of_which_a_rank_has_no_part_is_named(ranks, call_all):
    """Each rank calls one expert, and not all the same: as many gathers of the same sizes, which pair wrongly."""

    def mixture() -> nn.Module:
        model = Experts()
        model.call_all = call_all
        return model

    if call_all:
        assert failures(ranks, Program(Mixture, mixture, batch), Scenario(4, 4), Scenario(4, 4, steps=2)) == []
        return
    with pytest.raises(ScalingMismatch) as info:
        assert_step_scales(ranks, Mixture, build=mixture, batch=batch, sizes=[4], world_sizes=[4], max_examples=3)
    assert "gradient of experts.0.weight, gradient of experts.0.bias: of ranks 0-3" in str(info.value)
    assert info.value.mistakes == ("decision-per-rank",)


def test_training_that_is_resumed_is_compared_before_its_state_is_gathered(ranks):
    def train(rank, directory, start, stop):
        model = Mlp().to(rank.device)
        if rank.index == 1:
            dist.all_reduce(torch.ones(1, device=rank.device), async_op=True)
        return {"model": model}

    with pytest.raises(AssertionError, match="by the end of steps 0 to 3, rank 1 made 1: all_reduce #1"):
        assert_resume_continues(ranks, train, world_sizes=[2])


def test_a_message_without_a_receiver_is_named(ranks):
    def step(model, batch, rank, odd):
        one = torch.ones(4, device=rank.device)
        if rank.index == 0 and rank.size > 1:
            dist.send(one, 1)
        if rank.index == 1:
            dist.recv(one, 0)
        if odd and rank.index == 2:
            dist.isend(one, 3)
        return {"one": one}

    def ones(model, batch):
        return {"one": torch.ones(4)}

    matched, odd = (functools.partial(step, odd=odd) for odd in (False, True))
    assert failures(ranks, Program(matched, Mlp, batch, ones), Scenario(4, 4)) == []
    with pytest.raises(ScalingMismatch, match=r"rank 2 of 4 has sent float32\[4\] to rank 3 in isend") as info:
        assert_step_scales(ranks, odd, build=Mlp, batch=batch, reference=ones, world_sizes=[4], sizes=[4])
    assert info.value.mistakes == ("decision-per-rank",)
