"""The gate for evaluation: what makes ranks answer otherwise is named, and what keeps them alike passes."""

from __future__ import annotations

import dataclasses
import functools
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import dropout, linear, mse_loss
from torch.nn.parallel import DistributedDataParallel

from mgpu_check import RankFailure, ScalingMismatch, assert_evaluation_agrees

pytestmark = pytest.mark.gpus(4)


def build(dropout=0.0, norm=True):
    return nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1d(4) if norm else nn.Identity(), nn.Dropout(dropout), nn.Linear(4, 2)
    )


plain = functools.partial(build, norm=False)


def batch(n):
    return {"x": torch.randn(n, 3), "y": torch.randn(n, 2)}


def loss(model, batch, rank, device):
    x, y = (batch[name][rank.index :: rank.size].to(device) for name in ("x", "y"))
    return mse_loss(model(x), y)


def step(model, batch, rank, wrap=DistributedDataParallel, broadcast=False):
    parallel = wrap(model.to(rank.device))
    loss(parallel, batch, rank, rank.device).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    if broadcast:
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)


def inputs(model, batch):
    return batch["x"].to(model[0].weight.device)


def agrees(ranks, step, **options):
    assert_evaluation_agrees(ranks, step, **{"build": build, "batch": batch, "world_sizes": [2], **options})


def refuted(ranks, step, *mistakes, match, **options):
    with pytest.raises(ScalingMismatch, match=match) as caught:
        agrees(ranks, step, **options)
    assert caught.value.mistakes == mistakes, str(caught.value)
    return caught.value


def test_buffers_after_the_last_step(ranks):
    match = r"buffer '1\.running_mean' differs on rank 1: element \[\d\] is \S+ on rank 0, \S+ on rank 1"
    error = refuted(ranks, step, "buffers-drift", match=match)
    assert error.ranks == (1,)
    assert "smallest case: world size 2, samples 8, steps 3" in str(error) and "SyncBatchNorm" in str(error)
    agrees(ranks, functools.partial(step, broadcast=True), world_sizes=None)


def test_buffers_that_answers_do_not_depend_on(ranks):
    agrees(ranks, step, evaluate=lambda model, batch: model[0](inputs(model, batch)))


def test_parameters(ranks):
    bare = functools.partial(step, wrap=lambda model: model)
    options = {"build": plain, "match": r"parameter '0\.weight' differs on ranks 1-3: element", "world_sizes": [4]}
    error = refuted(ranks, bare, "gradients-not-synchronized", sizes=[8, 16], **options)
    assert "samples 8" in str(error) and error.ranks == (1, 2, 3)
    refuted(ranks, bare, "gradients-not-synchronized", "buffers-drift", match="parameter")


def test_initial_parameters(ranks):
    def built():
        torch.manual_seed(dist.get_rank())
        return plain()

    def reduced(model, batch, rank):
        mse_loss(model(batch["x"]), batch["y"]).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        torch.optim.SGD(model.parameters(), lr=0.01).step()

    refuted(ranks, reduced, "different-initialization", match=r"parameter '0\.weight'", build=built)
    agrees(ranks, reduced, build=plain)


def test_dropout_in_evaluation(ranks):
    def on(model, batch):
        return dropout(model(inputs(model, batch)))

    error = refuted(ranks, step, "evaluation-differs", match="answer 'answer' differs", build=plain, evaluate=on)
    assert "rank 0 gives another answer under another seed: element" in str(error) and " first, " in str(error)

    def off(model, batch):
        return dropout(model(inputs(model, batch)), training=model.training)

    agrees(ranks, step, build=lambda: build(0.5, norm=False), evaluate=off)


def test_an_answer_for_each_rank(ranks):
    def share(model, batch):
        own = inputs(model, batch)[dist.get_rank() :: dist.get_world_size()]
        return {"scores": [model(own).sum()], "n": 3}

    differs = r"answer 'answer\.scores\.0' differs"
    error = refuted(ranks, step, "evaluation-differs", match=differs, build=plain, evaluate=share)
    assert "parameters and buffers are equal on all ranks, to the bit" in str(error)

    def shape(model, batch):
        return torch.ones(2 + dist.get_rank())

    differs = r"\(2,\) float32 on rank 0, \(3,\) float32 on rank 1"
    refuted(ranks, step, "evaluation-differs", match=differs, build=plain, evaluate=shape)


class Trainer:
    def __init__(self, model, rank, broken=False):
        self.broken, self.calls, self.parallel = broken, 0, DistributedDataParallel(model.to(rank.device))
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def __call__(self, model, batch, rank):
        self.calls += 1
        self.optimizer.zero_grad()
        loss(self.parallel, batch, rank, rank.device).backward()
        if self.broken and self.calls > 1:  # seen only where the object outlives a step
            next(model.parameters()).grad.mul_(1 + rank.index)
        self.optimizer.step()


def test_a_class(ranks):
    options = {"build": plain, "sizes": 8, "world_sizes": [2]}
    agrees(ranks, Trainer, **options)
    broken = functools.partial(Trainer, broken=True)
    error = refuted(ranks, broken, "gradients-not-synchronized", match=r"0\.weight' differs on rank 1", **options)
    assert "samples 8" in str(error)


class Shifted(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        self.register_buffer("shift", torch.zeros(2))

    def forward(self, x):
        return super().forward(x) + self.shift


def test_fully_shard(ranks):
    def sharded(model, batch, rank, off=0.0):
        if not hasattr(model, "set_requires_gradient_sync"):
            fully_shard(model, mesh=init_device_mesh("cpu", (rank.size,)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.zero_grad()
        loss(model, batch, rank, "cpu").backward()
        optimizer.step()
        for buffer in model.buffers():
            buffer += off * rank.index

    agrees(ranks, sharded, build=Shifted)
    differs = "buffer 'shift' differs on rank 1"
    refuted(ranks, functools.partial(sharded, off=0.1), "buffers-drift", build=Shifted, match=differs)


@dataclasses.dataclass
class Answer:
    scores: torch.Tensor


class Question:
    def __init__(self, x: Any) -> None:
        self.x, self.lock = x, threading.Lock


def test_objects(ranks):
    def answer(model, batch, off=0.0):
        scores = model(inputs(model, batch)).repeat(200, 1)
        scores[700] += off * dist.get_rank()  # which repr does not show
        return Answer(scores)

    def questions(n):
        return {**batch(n), "opaque": Question(threading.Lock())}

    options = {"build": plain, "world_sizes": [2], "batch": questions}
    agrees(ranks, step, evaluate=answer, **options)
    moved = functools.partial(answer, off=1e-3)
    differs = r"answer 'answer\.scores' differs on rank 1"
    refuted(ranks, step, "evaluation-differs", match=differs, evaluate=moved, **options)


def test_rounding(ranks):
    def reordered(model, batch, off):
        order = torch.arange(4) if dist.get_rank() == 0 else torch.arange(4).flip(0)
        hidden = model[0](inputs(model, batch))[:, order]
        answer = linear(hidden.double(), model[3].weight[:, order].double()).float()
        return answer * (1 + dist.get_rank() * off)

    one_bit, more = (functools.partial(reordered, off=off) for off in (1e-7, 1e-4))
    agrees(ranks, step, build=plain, evaluate=one_bit)
    refuted(ranks, step, "evaluation-differs", match="answer", build=plain, evaluate=more)


def test_errors_of_ranks_say_where(ranks):
    def failing(model, batch):
        raise KeyError("labels")

    with pytest.raises(RankFailure, match="KeyError") as caught:
        agrees(ranks, step, evaluate=failing)
    assert caught.value.__notes__ == ["while checking the evaluation of 8 samples after 3 steps at world size 2"]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"steps": 0}, "steps=0"),
        ({"sizes": []}, r"sizes=\[\]; give an int of at least 1, or several"),
        ({"sizes": [8, 0]}, r"sizes=\[8, 0\]"),
        (
            {"evaluate": lambda model, batch: object()},
            r"evaluate.* returned an answer that cannot be compared: answer is a object, which cannot",
        ),
        ({"build": lambda: 3}, r"returned a int; return a torch\.nn\.Module"),
        (
            {"batch": lambda n: {"x": torch.randn(n, 3) + dist.get_rank(), "y": torch.randn(n, 2)}},
            r"differs on ranks? 1 from that of rank 0",
        ),
        ({"evaluate": lambda model, batch: None}, "returned no tensor"),
        ({"step": lambda model, batch, rank: None}, "leaves all parameters of the model"),
    ],
)
def test_misuse(ranks, options, match):
    given = {"step": step, **options}
    with pytest.raises(ValueError, match=match):
        agrees(ranks, given.pop("step"), **given)
