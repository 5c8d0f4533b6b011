"""The gate for evaluation: what makes ranks answer otherwise is named, and what keeps them alike passes."""

from __future__ import annotations

GPUS = ("--gpus=4", "--simulate", "--rank-timeout=60")

CODE = """
import dataclasses
import functools
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from mgpu_check import assert_evaluation_agrees
from mgpu_check.errors import RankFailure, ScalingMismatch

def build(dropout=0.0, norm=True):
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4) if norm else nn.Identity(), nn.Dropout(dropout), nn.Linear(4, 2))

def batch(n):
    return {"x": torch.randn(n, 3), "y": torch.randn(n, 2)}

def step(model, batch, rank, wrap=DistributedDataParallel, convert=False, broadcast=False):
    model.to(rank.device)
    parallel = wrap(nn.SyncBatchNorm.convert_sync_batchnorm(model) if convert else model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = (batch[name][rank.index::rank.size].to(rank.device) for name in ("x", "y"))
    nn.functional.mse_loss(parallel(x), y).backward()
    optimizer.step()
    if broadcast:
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)

def refuted(ranks, step, *mistakes, match, **options):
    with pytest.raises(ScalingMismatch, match=match) as caught:
        assert_evaluation_agrees(ranks, step, **{"build": build, "batch": batch, **options})
    assert caught.value.mistakes == mistakes, str(caught.value)
    return caught.value

def test_without_buffers(ranks):
    assert_evaluation_agrees(ranks, step, build=lambda: build(norm=False), batch=batch)

def test_buffers_after_the_last_step(ranks):
    error = refuted(
        ranks, step, "buffers-drift",
        match=r"buffer '1.running_mean' differs on rank 1: element \\[\\d\\] is \\S+ on rank 0, \\S+ on rank 1",
    )
    assert error.ranks == (1,)
    assert "smallest case: world size 2, samples 8, steps 3" in str(error) and "SyncBatchNorm" in str(error)
    assert_evaluation_agrees(ranks, lambda model, batch, rank: step(model, batch, rank, broadcast=True), build=build, batch=batch)

def test_buffers_that_answers_do_not_depend_on(ranks):
    assert_evaluation_agrees(ranks, step, build=build, batch=batch, evaluate=lambda model, batch: model[0](batch["x"].to(model[0].weight.device)))

def test_parameters(ranks):
    def bare(model, batch, rank):
        step(model, batch, rank, wrap=lambda model: model)
    error = refuted(
        ranks, bare, "gradients-not-synchronized", build=lambda: build(norm=False),
        match=r"parameter '0.weight' differs on ranks 1-3: element", world_sizes=[4], sizes=[8, 16],
    )
    assert "samples 8" in str(error) and error.ranks == (1, 2, 3)
    refuted(ranks, bare, "gradients-not-synchronized", "buffers-drift", match="parameter")

def test_a_step_on_one_rank_only(ranks):
    def uneven(model, batch, rank):
        if rank.index == 0:
            step(model, batch, rank, wrap=lambda model: model)
    refuted(ranks, uneven, "gradients-not-synchronized", match="parameter", build=lambda: build(norm=False))

def test_initial_parameters(ranks):
    def built():
        torch.manual_seed(dist.get_rank())
        return build(norm=False)
    def reduced(model, batch, rank):
        nn.functional.mse_loss(model(batch["x"]), batch["y"]).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        torch.optim.SGD(model.parameters(), lr=0.01).step()
    refuted(ranks, reduced, "different-initialization", match="parameter '0.weight'", build=built)
    assert_evaluation_agrees(ranks, reduced, build=lambda: build(norm=False), batch=batch)

def test_dropout_in_evaluation(ranks):
    def on(model, batch):
        return nn.functional.dropout(model(batch["x"].to(model[0].weight.device)))
    error = refuted(
        ranks, step, "evaluation-differs", match="answer 'answer' differs", build=lambda: build(norm=False), evaluate=on,
    )
    assert "asked again under another seed, rank 0 answers otherwise: element" in str(error) and " first, " in str(error)
    def off(model, batch):
        return nn.functional.dropout(model(batch["x"].to(model[0].weight.device)), training=model.training)
    assert_evaluation_agrees(ranks, step, build=lambda: build(0.5, norm=False), batch=batch, evaluate=off)

def test_an_answer_for_each_rank(ranks):
    def share(model, batch):
        return {"scores": [model(batch["x"].to(model[0].weight.device)[dist.get_rank()::dist.get_world_size()]).sum()], "n": 3}
    error = refuted(
        ranks, step, "evaluation-differs", match="answer 'answer.scores.0' differs", build=lambda: build(norm=False),
        evaluate=share,
    )
    assert "parameters and buffers are equal on all ranks, to the bit" in str(error)
    def shape(model, batch):
        return torch.ones(2 + dist.get_rank())
    refuted(
        ranks, step, "evaluation-differs", match=r"\\(2,\\) float32 on rank 0, \\(3,\\) float32 on rank 1",
        build=lambda: build(norm=False), evaluate=shape,
    )

class Trainer:
    def __init__(self, model, rank, broken=False):
        self.broken, self.calls, self.parallel = broken, 0, DistributedDataParallel(model.to(rank.device))
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def __call__(self, model, batch, rank):
        self.calls += 1
        x, y = (batch[name][rank.index::rank.size].to(rank.device) for name in ("x", "y"))
        self.optimizer.zero_grad()
        nn.functional.mse_loss(self.parallel(x), y).backward()
        if self.broken and self.calls > 1:  # seen only where the object outlives a step
            next(model.parameters()).grad.mul_(1 + rank.index)
        self.optimizer.step()

def test_a_class(ranks):
    options = {"build": lambda: build(norm=False), "batch": batch, "sizes": 8, "world_sizes": [2]}
    assert_evaluation_agrees(ranks, Trainer, **options)
    assert_evaluation_agrees(ranks, functools.partial(Trainer, broken=False), **options)
    error = refuted(
        ranks, functools.partial(Trainer, broken=True), "gradients-not-synchronized", match="0.weight' differs on rank 1", **options
    )
    assert "samples 8" in str(error)

def test_fully_shard(ranks):
    def sharded(model, batch, rank, off=0.0):
        if not hasattr(model, "set_requires_gradient_sync"):
            fully_shard(model, mesh=init_device_mesh("cpu", (rank.size,)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.zero_grad()
        x, y = (batch[name][rank.index::rank.size] for name in ("x", "y"))
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        for buffer in model.buffers():
            buffer += off * rank.index
    class Shifted(nn.Sequential):
        def __init__(self):
            super().__init__(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
            self.register_buffer("shift", torch.zeros(2))
        def forward(self, x):
            return super().forward(x) + self.shift
    assert_evaluation_agrees(ranks, sharded, build=Shifted, batch=batch)
    refuted(
        ranks, functools.partial(sharded, off=0.1), "buffers-drift", build=Shifted, match="buffer 'shift' differs on rank 1",
    )

def test_objects(ranks):
    @dataclasses.dataclass
    class Answer:
        scores: torch.Tensor
    class Question:
        def __init__(self, x):
            self.x, self.lock = x, threading.Lock
    def answer(model, batch, off):
        scores = model(batch["x"].to(model[0].weight.device)).repeat(200, 1)
        scores[700] += off * dist.get_rank()  # which repr does not show
        return Answer(scores)
    options = {"build": lambda: build(norm=False), "world_sizes": [2]}
    questions = lambda n: {**batch(n), "opaque": Question(threading.Lock())}
    assert_evaluation_agrees(ranks, step, batch=questions, evaluate=lambda m, b: answer(m, b, 0), **options)
    refuted(
        ranks, step, "evaluation-differs", match="answer 'answer.scores' differs on rank 1", batch=questions,
        evaluate=lambda m, b: answer(m, b, 1e-3), **options,
    )

def test_rounding(ranks):
    def reordered(model, batch, off=0.0):
        x = batch["x"].to(model[0].weight.device)
        order = torch.arange(4) if dist.get_rank() == 0 else torch.arange(4).flip(0)
        hidden = model[0](x)[:, order]
        return nn.functional.linear(hidden.double(), model[3].weight[:, order].double()).float() * (1 + dist.get_rank() * off)
    def rounded(model, batch):
        return reordered(model, batch, 1e-7)  # one bit, about
    assert_evaluation_agrees(ranks, step, build=lambda: build(norm=False), batch=batch, evaluate=rounded)
    def wrong(model, batch):
        return reordered(model, batch, 1e-4)
    refuted(ranks, step, "evaluation-differs", match="answer", build=lambda: build(norm=False), evaluate=wrong)

def test_errors_of_ranks_say_where(ranks):
    def failing(model, batch):
        raise KeyError("labels")
    with pytest.raises(RankFailure, match="KeyError") as caught:
        assert_evaluation_agrees(ranks, step, build=build, batch=batch, evaluate=failing)
    assert caught.value.__notes__ == ["while checking the evaluation of 8 samples after 3 steps at world size 2"]

def test_misuse(ranks):
    for options, match in [
        ({"steps": 0}, "steps=0"),
        ({"steps": True}, "steps=True"),
        ({"sizes": []}, r"sizes=\\[\\]; give an int of at least 1, or several"),
        ({"sizes": [8, 0]}, r"sizes=\\[8, 0\\]"),
        ({"sizes": ["4", 2]}, r"sizes=\\['4', 2\\]"),
        ({"sizes": 0}, "sizes=0;"),
        ({"sizes": True}, "sizes=True"),
        ({"sizes": [True]}, r"sizes=\\[True\\]"),
        ({"sizes": "divisible"}, "sizes='divisible'"),
        ({"evaluate": lambda model, batch: object()}, "of what evaluate.* returned, answer is a object, which cannot"),
        ({"world_sizes": ["2"]}, "world_sizes has '2'"),
        ({"build": lambda: 3}, "returned a int; return a torch.nn.Module"),
        ({"batch": lambda n: {"x": torch.randn(n, 3) + dist.get_rank(), "y": torch.randn(n, 2)}}, "differs on ranks? 1 from that of rank 0"),
        ({"evaluate": lambda model, batch: None}, "returned no tensor"),
        ({"step": lambda model, batch, rank: None}, "leaves all parameters of the model"),
    ]:
        with pytest.raises(ValueError, match=match):
            given = {"build": build, "batch": batch, "step": step, **options}
            assert_evaluation_agrees(ranks, given.pop("step"), **given)
"""


def test_evaluating(run, pytester):
    pytester.makepyfile(test_it=CODE)
    run(*GPUS).assert_outcomes(passed=14)
