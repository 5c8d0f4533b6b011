"""Steps whose ranks hold state of their own on purpose: local SGD, federated averaging, DiLoCo."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from mgpu_check.gates.gate_arguments import Program
from mgpu_check.gates.search.scenarios import Scenario
from tests.gates.single_cases import failures
from tests.gates.steps import build, chunked, regression, variant

pytestmark = pytest.mark.gpus(2)

INNER = 2


def steps(optimizer, model, x, y):
    for a, b in zip(x.chunk(INNER), y.chunk(INNER), strict=True):
        optimizer.zero_grad()
        F.mse_loss(model(a), b).backward()
        optimizer.step()


class Base:
    wrong = ""

    def mean(self, tensor, rank):
        dist.all_reduce(tensor)
        tensor /= 1 if self.wrong else rank.size


class FedAvg(Base):
    """A fresh local copy in each round; the model becomes their mean."""

    def __init__(self, model, rank):
        model.to(rank.device)

    def __call__(self, model, batch, rank):
        local = copy.deepcopy(model)
        steps(torch.optim.SGD(local.parameters(), lr=0.1, momentum=0.9), local, *chunked(batch, rank))
        for p, q in zip(model.parameters(), local.parameters(), strict=True):
            mean = q.detach().clone()
            self.mean(mean, rank)
            p.data.copy_(mean)


class RefFedAvg:
    momentum = 0.9
    keeps = False  # its replicas, and the states of their optimizers

    def __init__(self, model):
        self.locals = []

    def inner(self, local):
        return torch.optim.SGD(local.parameters(), lr=0.1, momentum=self.momentum)

    def replicas(self, model, batch, world_size):
        if not self.keeps or not self.locals:
            self.locals = [(local, self.inner(local)) for local in (copy.deepcopy(model) for _ in range(world_size))]
        parts = batch[0].chunk(world_size), batch[1].chunk(world_size)
        for (local, optimizer), x, y in zip(self.locals, *parts, strict=True):
            local.load_state_dict(model.state_dict())
            steps(optimizer, local, x, y)
        return zip(model.parameters(), *(local.parameters() for local, _ in self.locals), strict=True)

    def __call__(self, model, batch, world_size):
        for p, *qs in self.replicas(model, batch, world_size):
            p.data.copy_(sum(q.detach() for q in qs) / world_size)


class InPlace(Base):
    """Local SGD as most write it: the model itself is trained, then averaged."""

    def __init__(self, model, rank):
        self.optimizer = torch.optim.SGD(model.to(rank.device).parameters(), lr=0.1)

    def __call__(self, model, batch, rank):
        steps(self.optimizer, model, *chunked(batch, rank))  # leaves gradients of each rank's own
        with torch.no_grad():
            for p in model.parameters():
                self.mean(p, rank)


class DiLoCo(Base):
    """Outer Nesterov over pseudogradients; the inner optimizer lives on and keeps its moments on each rank."""

    def __init__(self, model, rank):
        self.outer = torch.optim.SGD(model.to(rank.device).parameters(), lr=0.7, momentum=0.9, nesterov=True)
        self.local = copy.deepcopy(model)
        self.inner = torch.optim.AdamW(self.local.parameters(), lr=0.01)

    def __call__(self, model, batch, rank):
        self.local.load_state_dict(model.state_dict())
        steps(self.inner, self.local, *chunked(batch, rank))
        for p, q in zip(model.parameters(), self.local.parameters(), strict=True):
            p.grad = p.detach() - q.detach()
            self.mean(p.grad, rank)
        self.outer.step()


class RefDiLoCo(RefFedAvg):
    keeps = True

    def __init__(self, model):
        super().__init__(model)
        self.outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)

    def inner(self, local):
        return torch.optim.AdamW(local.parameters(), lr=0.01)

    def __call__(self, model, batch, world_size):
        for p, *qs in self.replicas(model, batch, world_size):
            p.grad = sum(p.detach() - q.detach() for q in qs) / world_size
        self.outer.step()


CASES = {
    "fedavg": (FedAvg, RefFedAvg),
    "in-place": (InPlace, variant(RefFedAvg, momentum=0)),
    "diloco": (DiLoCo, RefDiLoCo),
}
SEVERAL_STEPS = Scenario(2, 8, steps=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_state_of_its_own_need_not_agree(ranks, name):
    step, reference = CASES[name]
    program = Program(step, build, regression, reference)
    assert failures(ranks, program, Scenario(2, 8), SEVERAL_STEPS) == []


@pytest.mark.parametrize(
    "name", [name if name == "diloco" else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_the_model_that_ranks_share_must(ranks, name):
    step, reference = CASES[name]
    assert failures(ranks, Program(variant(step, wrong="sum"), build, regression, reference), SEVERAL_STEPS) != []


def test_a_pattern_may_name_what_is_local(ranks):
    program = Program(FedAvg, build, regression, RefFedAvg)
    pattern = {"parameter * of group *": "replicas of a rank"}
    assert failures(ranks, program, Scenario(2, 8), SEVERAL_STEPS, unjudged=pattern) == []
