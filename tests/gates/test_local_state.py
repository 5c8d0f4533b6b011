"""Steps whose ranks hold state of their own on purpose: local SGD, federated averaging, gossip, DiLoCo."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from tests.gates.steps import passes, refuted

pytestmark = pytest.mark.gpus(2)

INNER = 2


def build():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def batch(n):
    return torch.randn(n, 6), torch.randn(n, 3)


def steps(optimizer, model, x, y):
    for a, b in zip(x.chunk(INNER), y.chunk(INNER), strict=True):
        optimizer.zero_grad()
        F.mse_loss(model(a), b).backward()
        optimizer.step()


def by_hand(model, x, y):
    for a, b in zip(x.chunk(INNER), y.chunk(INNER), strict=True):
        model.zero_grad()
        F.mse_loss(model(a), b).backward()
        for p in model.parameters():
            p.data -= 0.1 * p.grad


def parts(batch, rank):
    return (part.chunk(rank.size)[rank.index].to(rank.device) for part in batch)


class Base:
    wrong = ""

    def mean(self, tensor, rank):
        if self.wrong != "sum":
            dist.all_reduce(tensor)
            tensor /= rank.size
        else:
            dist.all_reduce(tensor)


class FedAvg(Base):
    """A fresh local copy in each round; the model becomes their mean."""

    def __init__(self, model, rank):
        model.to(rank.device)

    def __call__(self, model, batch, rank):
        local = copy.deepcopy(model)
        steps(torch.optim.SGD(local.parameters(), lr=0.1, momentum=0.9), local, *parts(batch, rank))
        for p, q in zip(model.parameters(), local.parameters(), strict=True):
            mean = q.detach().clone()
            self.mean(mean, rank)
            p.data.copy_(mean)


class RefFedAvg:
    momentum = 0.9

    def __init__(self, model):
        pass

    def __call__(self, model, batch, world_size):
        replicas = []
        for x, y in zip(batch[0].chunk(world_size), batch[1].chunk(world_size), strict=True):
            local = copy.deepcopy(model)
            steps(torch.optim.SGD(local.parameters(), lr=0.1, momentum=self.momentum), local, x, y)
            replicas.append(list(local.parameters()))
        for p, *qs in zip(model.parameters(), *replicas, strict=True):
            p.data.copy_(sum(q.detach() for q in qs) / world_size)


class RefFedAvgOne(RefFedAvg):
    """One local model and one optimizer, used for each replica in turn."""

    def __init__(self, model):
        self.local = copy.deepcopy(model)

    def __call__(self, model, batch, world_size):
        total = [torch.zeros_like(p) for p in model.parameters()]
        optimizer = torch.optim.SGD(self.local.parameters(), lr=0.1, momentum=0.9)
        for x, y in zip(batch[0].chunk(world_size), batch[1].chunk(world_size), strict=True):
            self.local.load_state_dict(model.state_dict())
            optimizer.state.clear()
            steps(optimizer, self.local, x, y)
            for t, q in zip(total, self.local.parameters(), strict=True):
                t += q.detach() / world_size
        for p, t in zip(model.parameters(), total, strict=True):
            p.data.copy_(t)


class Persistent(Base):
    """The local copy and its optimizer live on; each round starts from the model."""

    def __init__(self, model, rank):
        self.local = copy.deepcopy(model.to(rank.device))
        self.optimizer = torch.optim.SGD(self.local.parameters(), lr=0.1)

    def __call__(self, model, batch, rank):
        self.local.load_state_dict(model.state_dict())
        steps(self.optimizer, self.local, *parts(batch, rank))
        with torch.no_grad():
            for p, q in zip(model.parameters(), self.local.parameters(), strict=True):
                mean = q.detach().clone()
                self.mean(mean, rank)
                p.copy_(mean)


class InPlace(Base):
    """Local SGD as most write it: the model itself is trained, then averaged."""

    def __init__(self, model, rank):
        self.optimizer = torch.optim.SGD(model.to(rank.device).parameters(), lr=0.1)

    def __call__(self, model, batch, rank):
        steps(self.optimizer, model, *parts(batch, rank))
        self.optimizer.zero_grad()
        with torch.no_grad():
            for p in model.parameters():
                self.mean(p, rank)


class InPlaceGradientsLeft(InPlace):
    def __call__(self, model, batch, rank):
        steps(self.optimizer, model, *parts(batch, rank))
        with torch.no_grad():
            for p in model.parameters():
                self.mean(p, rank)


class InPlaceMomentum(InPlace):
    """Each rank keeps the momentum of its own inner optimizer."""

    def __init__(self, model, rank):
        self.optimizer = torch.optim.SGD(model.to(rank.device).parameters(), lr=0.1, momentum=0.9)


class RefInPlaceMomentum:
    def __init__(self, model):
        self.replicas = None

    def __call__(self, model, batch, world_size):
        if self.replicas is None:
            self.replicas = [copy.deepcopy(model) for _ in range(world_size)]
            self.optimizers = [torch.optim.SGD(r.parameters(), lr=0.1, momentum=0.9) for r in self.replicas]
        parts = batch[0].chunk(world_size), batch[1].chunk(world_size)
        for replica, optimizer, x, y in zip(self.replicas, self.optimizers, *parts, strict=True):
            replica.load_state_dict(model.state_dict())
            steps(optimizer, replica, x, y)
        for p, *qs in zip(model.parameters(), *(r.parameters() for r in self.replicas), strict=True):
            p.data.copy_(sum(q.detach() for q in qs) / world_size)


class InnerByHand(FedAvg):
    def __call__(self, model, batch, rank):
        local = copy.deepcopy(model)
        by_hand(local, *parts(batch, rank))
        for p, q in zip(model.parameters(), local.parameters(), strict=True):
            mean = q.detach().clone()
            self.mean(mean, rank)
            p.data.copy_(mean)


class RefInnerByHand(RefFedAvg):
    momentum = 0


class Gossip(FedAvg):
    """Replicas train alone and mix over a hypercube; the model is their consensus."""

    def mean(self, tensor, rank):
        distance = 1
        while distance < rank.size:
            partner = rank.index ^ distance
            other = torch.empty_like(tensor)
            both = [dist.P2POp(dist.isend, tensor.contiguous(), partner), dist.P2POp(dist.irecv, other, partner)]
            for request in dist.batch_isend_irecv(both):
                request.wait()
            tensor.copy_((tensor + other) / (1 if self.wrong else 2))
            distance *= 2


class DiLoCo(Base):
    """Outer Nesterov over pseudogradients; the inner optimizer lives on and keeps its moments on each rank."""

    def __init__(self, model, rank):
        self.outer = torch.optim.SGD(model.to(rank.device).parameters(), lr=0.7, momentum=0.9, nesterov=True)
        self.local = copy.deepcopy(model)
        self.inner = torch.optim.AdamW(self.local.parameters(), lr=0.01)

    def __call__(self, model, batch, rank):
        self.local.load_state_dict(model.state_dict())
        steps(self.inner, self.local, *parts(batch, rank))
        for p, q in zip(model.parameters(), self.local.parameters(), strict=True):
            p.grad = p.detach() - q.detach()
            self.mean(p.grad, rank)
        self.outer.step()


class RefDiLoCo:
    def __init__(self, model):
        self.outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        self.locals = None

    def __call__(self, model, batch, world_size):
        if self.locals is None:
            self.locals = [copy.deepcopy(model) for _ in range(world_size)]
            self.inner = [torch.optim.AdamW(r.parameters(), lr=0.01) for r in self.locals]
        self.outer.zero_grad()
        parts = batch[0].chunk(world_size), batch[1].chunk(world_size)
        for local, inner, x, y in zip(self.locals, self.inner, *parts, strict=True):
            local.load_state_dict(model.state_dict())
            steps(inner, local, x, y)
            for p, q in zip(model.parameters(), local.parameters(), strict=True):
                part = (p.detach() - q.detach()) / world_size
                p.grad = part if p.grad is None else p.grad + part
        self.outer.step()


class LossWeight:
    """Not local: a learnable weight beside the model, which ranks must keep equal."""

    wrong = ""

    def __init__(self, model, rank):
        model.to(rank.device)
        self.scale = nn.Parameter(torch.ones(3, device=rank.device))
        self.optimizer = torch.optim.SGD([*model.parameters(), self.scale], lr=0.1)

    def __call__(self, model, batch, rank):
        x, y = parts(batch, rank)
        self.optimizer.zero_grad()
        F.mse_loss(model(x) * self.scale, y).backward()
        for p in (*model.parameters(), *(() if self.wrong else (self.scale,))):
            dist.all_reduce(p.grad)
            p.grad /= rank.size
        self.optimizer.step()


class RefLossWeight:
    def __init__(self, model):
        self.scale = nn.Parameter(torch.ones(3))
        self.optimizer = torch.optim.SGD([*model.parameters(), self.scale], lr=0.1)

    def __call__(self, model, batch):
        self.optimizer.zero_grad()
        F.mse_loss(model(batch[0]) * self.scale, batch[1]).backward()
        self.optimizer.step()


CASES = {
    "fedavg": (FedAvg, RefFedAvg),
    "fedavg-one": (FedAvg, RefFedAvgOne),
    "persistent": (Persistent, RefInnerByHand),
    "in-place": (InPlace, RefInnerByHand),
    "in-place-left": (InPlaceGradientsLeft, RefInnerByHand),
    "momentum": (InPlaceMomentum, RefInPlaceMomentum),
    "by-hand": (InnerByHand, RefInnerByHand),
    "gossip": (Gossip, RefFedAvg),
    "diloco": (DiLoCo, RefDiLoCo),
    "loss-weight": (LossWeight, RefLossWeight),
    "loss-weight-alone": (LossWeight, None),
}


FEW: dict[str, Any] = {"build": build, "batch": batch, "sizes": [8], "world_sizes": [2], "max_examples": 6}


def few(*slow: str) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.slow if name in slow else ()) for name in CASES]


@pytest.mark.parametrize("name", few("fedavg-one", "persistent", "by-hand"))
def test_state_of_its_own_need_not_agree(ranks, name):
    step, reference = CASES[name]
    passes(ranks, step, reference=reference, **FEW)


@pytest.mark.parametrize("name", few(*CASES.keys() - {"fedavg", "diloco", "loss-weight"}))
def test_the_model_that_ranks_share_must(ranks, name):
    step, reference = CASES[name]
    wrong = type(step.__name__, (step,), {"wrong": "sum"})
    refuted(ranks, wrong, reference=reference, **FEW)


def test_a_pattern_may_name_what_is_local(ranks):
    passes(ranks, FedAvg, reference=RefFedAvg, unjudged={"parameter * of group *": "replicas of a rank"}, **FEW)
