"""A step that leaves the model or the batch on the CPU: the first sentence names it, if the step works without that."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mgpu_check import assert_evaluation_agrees, assert_metric_scales, assert_step_scales, assert_steps_agree
from mgpu_check.engine.failures import Account, Interrupted, Raised, Who
from mgpu_check.errors import ScalingMismatch
from mgpu_check.gates.gate_arguments import Program
from mgpu_check.gates.run.hypotheses import left_on_cpu
from mgpu_check.processes.channel import RaisedInRank

pytestmark = pytest.mark.gpus(2)
FEW: Any = {"sizes": "divisible", "max_examples": 2}
MODEL = "the model arrives on the CPU: move it to rank.device"
BATCH = "the batch arrives on the CPU: move it to rank.device"
BOTH = "model and batch arrive on the CPU: move both to rank.device"
OF_EVALUATE = "the batch of evaluate arrives on the CPU: move it to the device of the model"


def build():
    return nn.Linear(3, 1)


def batch(n):
    return torch.randn(n, 3), torch.randn(n, 1)


def train(model, x, y):
    nn.functional.mse_loss(model(x), y).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def part(batch, rank):
    return [tensor.chunk(rank.size)[rank.index] for tensor in batch]


def moved(batch, rank):
    return [tensor.to(rank.device) for tensor in part(batch, rank)]


def right(model, batch, rank):
    train(model.to(rank.device), *moved(batch, rank))


def without_model(model, batch, rank):
    train(model, *moved(batch, rank))


def without_batch(model, batch, rank):
    train(model.to(rank.device), *part(batch, rank))


def wrapping(model, batch, rank):
    DistributedDataParallel(model, device_ids=[rank.device])


def without_both(model, batch, rank):
    if any(tensor.device.type == "cpu" for tensor in (*model.parameters(), *batch)):
        raise RuntimeError("a kernel cannot read memory of the host")
    train(model, *part(batch, rank))


@pytest.mark.parametrize(
    ("step", "sentence"),
    [
        (without_model, MODEL),
        (without_batch, BATCH),
        (without_both, BOTH),
        (wrapping, MODEL),
    ],
)
def test_the_first_sentence_names_it(ranks, step, sentence):
    with pytest.raises(ValueError, match=f"^assert_step_scales: {sentence}; nothing was compared at world size 2"):
        assert_step_scales(ranks, step, build=build, batch=batch, **FEW)


def a_tensor_of_its_own(model, batch, rank):
    x, y = moved(batch, rank)
    train(model.to(rank.device), x * torch.ones(3), y)


def back_on_the_cpu(model, batch, rank):
    x, y = moved(batch, rank)
    train(model.to(rank.device), x, y.cpu())


@pytest.mark.parametrize("step", [a_tensor_of_its_own, back_on_the_cpu])
def test_other_tensors_on_the_cpu_accuse_neither(ranks, step):
    with pytest.raises(ValueError, match=f"^assert_step_scales: nothing was compared.*{step.__name__} fails"):
        assert_step_scales(ranks, step, build=build, batch=batch, **FEW)


RAISED = Account({0: Raised(RaisedInRank("error", "RuntimeError", "", "", "train.py", 1, None))}, Who(1)).error()
HUNG = Account({0: Interrupted(5.0, "")}, Who(1), deadline=5.0).error()


@pytest.mark.parametrize(
    ("error", "repeats", "sentence"), [(RAISED, True, BATCH), (RAISED, False, None), (HUNG, True, None)]
)
def test_a_failure_that_does_not_repeat_or_takes_a_time_limit_accuses_neither(error, repeats, sentence):
    def run(program):
        moved = getattr(program.step, "moved", ())
        if "batch" not in moved and (moved or repeats):
            raise error

    assert left_on_cpu(Program(without_batch, build, batch), error, run) == sentence


@pytest.mark.slow
def test_other_gates(ranks):
    def metric(model, batch, rank):
        x, y = (tensor[rank.index :: rank.size].to(rank.device) for tensor in batch)
        return {"error": (model(x) - y).sum()}

    with pytest.raises(ValueError, match=f"^assert_metric_scales: {MODEL}"):
        assert_metric_scales(ranks, metric, build=build, batch=batch, max_examples=2)
    with pytest.raises(ValueError, match=f"^assert_steps_agree: {BATCH}"):
        assert_steps_agree(ranks, {"one": without_batch, "other": without_batch}, build=build, batch=batch, **FEW)
    with pytest.raises(ValueError, match=f"^assert_evaluation_agrees: {BATCH}"):
        assert_evaluation_agrees(ranks, without_batch, build=build, batch=batch)
    evaluate = lambda model, batch: model(batch[0])  # noqa: E731
    with pytest.raises(ValueError, match=f"^assert_evaluation_agrees: {OF_EVALUATE}"):
        assert_evaluation_agrees(ranks, right, build=build, batch=batch, evaluate=evaluate)


def test_a_step_with_a_reference_fails_on_ranks_only(ranks):
    def reference(model, batch):
        nn.functional.mse_loss(model(batch[0]), batch[1]).backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()

    with pytest.raises(ScalingMismatch, match=f"^without_model does not scale: {MODEL}\n"):
        assert_step_scales(ranks, without_model, build=build, batch=batch, reference=reference, **FEW)
