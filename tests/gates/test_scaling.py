"""The gate for steps: right ones pass, and each relation is there for a mistake that needs it."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DataParallel
from torch.nn.parallel import DistributedDataParallel as DDP

from mgpu_check import RankHang, assert_step_scales
from mgpu_check.gates.gate_arguments import Program
from mgpu_check.gates.search.scenarios import Scenario
from tests.gates import steps
from tests.gates.patience import OnTime
from tests.gates.single_cases import failures
from tests.gates.steps import ALL, Training, batch, build, mine, passes, refuted, right, row, summed, tutorial

pytestmark = pytest.mark.gpus(4)
ONE: dict[str, Any] = {"sizes": [2], "max_examples": 1}  # one size, and so nothing to make smaller


def test_ddp(ranks):
    passes(ranks, right, **ALL)


def test_what_outlives_a_step(ranks):
    assert failures(ranks, Program(Training, build, batch), Scenario(2, 5), Scenario(2, 4, steps=2)) == []


def test_one_process_for_all_devices(ranks):
    def step(model, batch, rank):
        x, y = batch
        net = DataParallel(model.to(rank.device), device_ids=list(range(rank.size)))
        F.cross_entropy(net(x.to(rank.device)), y.to(rank.device)).backward()

    passes(ranks, step, single_process=True, max_examples=1)


@pytest.mark.slow
def test_a_reference_that_goes_shard_by_shard(ranks):
    def normalized():
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))

    def reference(model, batch, world_size):
        for rank in range(world_size):
            x, y = batch[0][rank::world_size], batch[1][rank::world_size]
            (F.cross_entropy(model(x), y) / world_size).backward()

    assert failures(ranks, Program(tutorial, normalized, batch, reference), Scenario(2, 8), kinds=["grads"]) == []
    refuted(ranks, tutorial, "batch-statistics-per-rank", build=normalized, sizes=[8], observe=("grads",))


@pytest.mark.slow
def test_code_that_cannot_be_alone_has_a_reference(ranks):
    def step(model, batch, rank):
        if rank.size == 1:
            os._exit(1)
        right(model, batch, rank)

    def reference(model, batch):
        F.cross_entropy(model(batch[0]), batch[1]).backward()

    passes(ranks, step, reference=reference, **ONE)
    with pytest.raises(ValueError, match="fails on one device"):
        passes(ranks, step, **ONE)


def test_shards_of_parameters_are_judged_by_what_is_returned(ranks):
    def step(model, batch, rank):
        width = model[0].weight.shape[0] // rank.size
        model[0].weight = nn.Parameter(model[0].weight[rank.index * width :][:width].detach().to(rank.device))
        part = batch[0].to(rank.device) @ model[0].weight.t()
        parts = [torch.empty_like(part) for _ in range(rank.size)]
        dist.all_gather(parts, part.detach())
        return {"hidden": torch.cat(parts, dim=1)}

    passes(ranks, step, **ONE)


@pytest.mark.slow
def test_ranks_agree_on_finite_values_that_repeat(ranks):
    def step(model, batch, rank):
        right(model, batch, rank)
        noise = torch.tensor(int.from_bytes(os.urandom(4), "little"))
        dist.broadcast(noise, 0)
        mean = batch[0][rank.size - 1 : 1].mean()
        return {"value": float(rank.index), "mean": mean, "noise": noise if rank.size > 1 else 0}

    text = refuted(ranks, step, match="first returned value", **ONE)
    line = row(text, "returned value")
    assert line[2:4] == ["NO", "NO"] and "rank 1" in " ".join(line), text
    assert row(text, "returned mean")[2:5] == ["NO", "yes", "NO"], text
    assert row(text, "returned noise")[2:6] == ["NO", "yes", "-", "NO"], text


def test_terminates_raised(ranks):
    def step(model, batch, rank):
        right(model, batch, rank)
        if rank.size > 1 and len(batch[0]) > 3:
            raise IndexError("no such shard")

    text = refuted(ranks, step, match="raised IndexError: no such shard")
    assert "terminates: NO" in text and "samples 4" in text, text


def test_terminates_died(ranks):
    def step(model, batch, rank):
        right(model, batch, rank)
        if rank.index == 1:
            os._exit(3)

    refuted(ranks, step, match="rank 1 of 2 died", **ONE)


def test_terminates_refused(ranks):
    def step(model, batch, rank):
        torch.cuda.set_device(0)  # as by a script that sets no device
        F.cross_entropy(DDP(model.cuda())(batch[0].cuda()), batch[1].cuda()).backward()

    text = refuted(ranks, step, match="ranks 0-1 of 2 raised DistBackendError: NCCL error: invalid usage")
    assert "smallest case: world size 2" in text and "verify_param_shape_across_processes #1" in text, text


@pytest.mark.slow  # test_hangs.py has the diagnosis, and test_loading.py a gate whose ranks hang
def test_hangs_are_reported_with_their_case_and_not_shrunk(ranks):
    def step(model, batch, rank):
        net = DDP(model.to(rank.device))
        for attempt in range(3):
            loss = summed(net, batch, rank)
            if attempt and rank.index:
                break
            loss.backward()

    passes(ranks, right, sizes=2, max_examples=1)  # what is slow the first time has been done by then
    limited: Any = OnTime(ranks, 6)
    with pytest.raises(RankHang) as caught:
        passes(limited, step)
    assert caught.value.mistakes == ("decision-per-rank",)
    text = str(caught.value)
    assert text.startswith("step does not scale: rank 0 of 2 did not finish step"), text
    assert "smallest case: world size 2, samples 2," in text and "terminates: NO" in text, text


@pytest.mark.slow
def test_a_loss_that_is_combined_after_backward_cuts_nothing(ranks):
    def step(model, batch, rank):
        x, y = mine(batch, rank)
        net = DDP(model.to(rank.device))
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        dist.all_reduce(loss)
        return loss / rank.size

    few = steps.FEW | {"sizes": [3], "max_examples": 1}
    steps.raised_by(assert_step_scales, ranks, step, "mean-of-means", **few)


# Steps that one device does not do in the same way each time.


def test_not_a_number_on_one_device(ranks):
    def step(model, batch, rank):
        return {"mean": batch[0][:0].mean()}

    with pytest.raises(ValueError, match=r"not a number on one device .returned mean, .*so it was for every batch"):
        passes(ranks, step, **ONE)


@pytest.mark.slow
def test_random_numbers_that_do_not_repeat(ranks):
    def step(model, batch, rank):
        torch.rand(int.from_bytes(os.urandom(1), "little") if rank.size > 1 else 1)
        return {"sum": batch[0].sum()}

    assert "NO" in row(refuted(ranks, step, **ONE), "state of the random numbers")


def rounded_at_random(by):
    """As sums by atomic additions on a GPU are: never the same bits twice."""

    def step(model, batch, rank):
        right(model, batch, rank)
        with torch.no_grad():
            for p in model.parameters():
                noise = torch.tensor(list(os.urandom(p.numel()))).view_as(p) / 128 - 1
                dist.broadcast(noise, 0)
                p.grad *= 1 + by * noise.to(p.device)

    return step


@pytest.mark.slow
def test_sums_in_no_fixed_order_are_right_and_more_than_rounding_is_not(ranks):
    program = Program(rounded_at_random(2 * 2.0**-24), build, batch)
    assert failures(ranks, program, Scenario(2, 5), Scenario(2, 4, change="scaled")) == []
    step = rounded_at_random(0.01)
    text = refuted(ranks, lambda m, b, r: (step if r.size > 1 else right)(m, b, r), **ONE)
    assert any(x.strip().startswith("gradient of") and "NO" in x for x in text.splitlines()), text
