"""The gate for divided models, case by case: what drawn programs have brought up (`benchmarks/divided.py`)."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from mgpu_check import Rank
from mgpu_check.gates.gate_arguments import Program
from mgpu_check.gates.run.shards import Held
from tests.gates.single_cases import failure
from tests.gates.steps import build, variant

pytestmark = pytest.mark.gpus(4)


class Towers(nn.Module):
    """Two layers that do not see each other, with biases of zero."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 8), nn.Linear(6, 8)
        for tower in self.towers():
            nn.init.zeros_(tower.bias)

    def towers(self) -> list[nn.Linear]:
        return [self.one, self.two]

    def cut(self, place: int, count: int) -> None:
        for tower in self.towers():
            for name, whole in list(tower.named_parameters()):
                setattr(tower, name, nn.Parameter(whole.detach().chunk(count)[place].clone()))


def rows(n: int) -> torch.Tensor:
    return torch.randn(n, 6)


def train(towers: Iterable[nn.Module], batch: torch.Tensor) -> None:
    for tower in towers:
        (tower(batch).square().sum() / len(batch)).backward()


class StagesOfSlices:
    """Ranks cut the layers of all stages along tp, and use those of their own stage only."""

    def __init__(self, model: Towers, rank: Rank, wrong: bool = False) -> None:
        self.wrong = wrong
        model.to(rank.device)
        model.cut(rank.mesh.get_local_rank("tp"), rank.mesh["tp"].size())
        mine = model.towers()[rank.mesh.get_local_rank("pp") :: rank.mesh["pp"].size()]
        self.towers = mine
        self.optimizer = torch.optim.SGD((one for tower in mine for one in tower.parameters()), lr=0.1)
        self.scale = 2.0 if self.wrong and rank.index == rank.size - 1 > 0 else 1.0

    def __call__(self, model: Towers, batch: torch.Tensor, rank: Rank) -> None:
        self.optimizer.zero_grad()
        train(self.towers, batch.to(rank.device))
        self.towers[0].weight.grad.mul_(self.scale)
        self.optimizer.step()


class FlatBiases:
    """Ranks step their part of a flat buffer of all biases, whose values are all zero, so that no place follows."""

    def __init__(self, model: Towers, rank: Rank, wrong: bool = False) -> None:
        self.wrong = wrong
        self.biases = [tower.bias for tower in model.to(rank.device).towers()]
        flat = torch.cat([bias.detach() for bias in self.biases])
        self.part = nn.Parameter(flat.chunk(rank.size)[rank.index].clone())
        weights = [tower.weight for tower in model.towers()]
        self.optimizer = torch.optim.SGD([*weights, self.part], lr=0.1, momentum=0.9)

    def __call__(self, model: Towers, batch: torch.Tensor, rank: Rank) -> None:
        model.zero_grad()
        train(model.towers(), batch.to(rank.device))
        flat = torch.cat([bias.grad for bias in self.biases])
        self.part.grad = flat.chunk(rank.size)[rank.index] * (2.0 if self.wrong and rank.index == 1 else 1.0)
        self.optimizer.step()
        parts = [torch.empty_like(self.part) for _ in range(rank.size)]
        dist.all_gather(parts, self.part.detach())
        with torch.no_grad():
            for bias, value in zip(self.biases, torch.cat(parts).chunk(2), strict=True):
                bias.grad = None
                bias.copy_(value)


class FlatSlices:
    """Ranks cut the weights, step all that they have in a flat buffer, and leave a gradient of the buffer only."""

    def __init__(self, model: Towers, rank: Rank, wrong: bool = False) -> None:
        self.wrong = wrong
        self.model = self.taken(model.to(rank.device), rank)
        self.flat = nn.Parameter(torch.cat([one.detach().flatten() for one in self.model.parameters()]))
        self.optimizer = torch.optim.SGD([self.flat], lr=0.1, momentum=0.9)

    def taken(self, model: Towers, rank: Rank) -> Towers:
        model.cut(rank.index, rank.size)
        return model

    def __call__(self, model: Towers, batch: torch.Tensor, rank: Rank) -> None:
        train(self.model.towers(), batch.to(rank.device))
        self.flat.grad = torch.cat([one.grad.flatten() for one in self.model.parameters()])
        if self.wrong and rank.index == 1:
            self.flat.grad[:3] *= 2
        self.model.zero_grad()
        self.optimizer.step()
        rest = self.flat.detach()
        with torch.no_grad():
            for one in self.model.parameters():
                one.copy_(rest[: one.numel()].view_as(one))
                rest = rest[one.numel() :]


class FlatCopy(FlatSlices):
    """Each rank has all of a copy of the model in a flat buffer; the model that the gate has is not used."""

    def taken(self, model: Towers, rank: Rank) -> Towers:
        return copy.deepcopy(model)


class ShardedCopy:
    """FSDP2 divides a copy of the model; the model that the gate has is not used."""

    copies, wrong = True, False

    def __init__(self, model: nn.Module, rank: Rank) -> None:
        self.model = (copy.deepcopy(model) if self.copies else model).to(rank.device)
        fully_shard(self.model, mesh=init_device_mesh(rank.device.type, (rank.size,)))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)

    def __call__(self, model: nn.Module, batch: torch.Tensor, rank: Rank) -> None:
        self.optimizer.zero_grad()
        self.model(batch.chunk(rank.size)[rank.index].to(rank.device)).square().mean().backward()
        if not self.wrong or rank.index < rank.size - 1 or rank.size == 1:
            self.optimizer.step()


class OtherOrderOnSomeRanks(ShardedCopy):
    """The optimizers of ranks have the same parameters in another order: states of DTensors are gathered all the
    same."""

    copies = False

    def __init__(self, model: nn.Module, rank: Rank) -> None:
        super().__init__(model, rank)
        parameters = list(self.model.parameters())
        self.optimizer = torch.optim.Adam(parameters[::-1] if rank.index else parameters, lr=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "mesh"),
    [(StagesOfSlices, {"pp": 2, "tp": 2}), *((step, {}) for step in (FlatBiases, FlatSlices, FlatCopy))],
)
def test_it_passes_and_its_twin_is_refuted(ranks: Any, step: Any, mesh: dict[str, int]) -> None:
    size = 4 if mesh else 2
    assert failure(ranks, Program(step, Towers, rows), size, 4, steps=2, mesh=mesh) is None
    failed = failure(ranks, Program(functools.partial(step, wrong=True), Towers, rows), size, 4, steps=2, mesh=mesh)
    assert failed is not None and failed.error is None


@pytest.mark.slow
@pytest.mark.parametrize("step", [ShardedCopy, OtherOrderOnSomeRanks])
def test_a_copy_that_a_library_divides_passes(ranks: Any, step: Any) -> None:
    assert failure(ranks, Program(step, build, rows), 2, 4, steps=2) is None


# The states of the optimizer are those of some ranks: to gather them would let these wait.
@pytest.mark.slow
@pytest.mark.parametrize("copies", [True, False])
def test_a_shard_that_is_not_stepped_is_refuted_by_its_values(ranks: Any, copies: bool) -> None:
    failed = failure(ranks, Program(variant(ShardedCopy, copies=copies, wrong=True), build, rows), 2, 4)
    assert failed is not None and failed.error is None


def test_a_gradient_that_is_not_reduced_is_reduced_before_its_part_is_copied() -> None:
    """Of stand-ins for DTensors."""
    reduced, placed = SimpleNamespace(to_local=lambda: torch.ones(2)), SimpleNamespace(placements=("shard",))
    gradient = SimpleNamespace(placements=("partial",), redistribute=lambda placements: reduced, to_local=None)
    tensor: Any = placed
    assert Held("params", "w", tensor, local=True).copy_of(gradient).tolist() == [1.0, 1.0]
