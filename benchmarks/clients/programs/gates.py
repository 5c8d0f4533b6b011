"""The gate on what the clients train. The runner lays this file out as a test beside them; see `clients.GATES`."""

import contextlib

import pytest
import torch
from gpt import GPT, LENGTH, VOCABULARY
from images import residual_network
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from toy_ddp import Toy

from mgpu_check import assert_metric_scales, assert_step_scales

FEW = {"sizes": "divisible", "max_examples": 6, "world_sizes": [2]}


def part(batch, rank):
    return [whole.chunk(rank.size)[rank.index].to(rank.device) for whole in batch]


def regress(model, batch, rank):
    x, y = part(batch, rank)
    model = DistributedDataParallel(model.to(rank.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()


def test_toy(ranks):
    assert_step_scales(ranks, regress, build=Toy, batch=lambda n: (torch.randn(n, 10), torch.randn(n, 5)), **FEW)


def on_its_own(model, batch, rank):
    x, y = part(batch, rank)
    model.to(rank.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()


def test_toy_without_ddp(ranks):
    assert_step_scales(ranks, on_its_own, build=Toy, batch=lambda n: (torch.randn(n, 10), torch.randn(n, 5)), **FEW)


def language_step(divided):
    def step(model, batch, rank):
        (tokens,) = part(batch, rank)
        model = DistributedDataParallel(model.to(rank.device))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        micro_batches = tokens.split(1)
        for number, rows in enumerate(micro_batches):
            last = number == len(micro_batches) - 1
            with contextlib.nullcontext() if last else model.no_sync():
                _, loss = model(rows[:, :-1], rows[:, 1:])
                (loss / len(micro_batches) if divided else loss).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 100.0)
        optimizer.step()

    return step


def whole(model, batch, world_size):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    (tokens,) = batch
    _, loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 100.0)
    optimizer.step()


@pytest.mark.parametrize("divided", [True, False], ids=["divided", "not-divided"])
def test_gpt(ranks, divided):
    def batch(n):
        return (torch.randint(0, VOCABULARY, (n, LENGTH + 1)),)

    sizes = FEW | {
        "sizes": [8],
        "max_examples": 3,
    }  # four micro-batches for each of two ranks: another factor than theirs
    assert_step_scales(ranks, language_step(divided), build=GPT, batch=batch, reference=whole, **sizes)


def classify(model, batch, rank):
    x, y = part(batch, rank)
    model = DistributedDataParallel(model.to(rank.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_images(ranks, norm):
    def batch(n):
        return (torch.randn(n, 3, 8, 8), torch.randint(0, 5, (n,)))

    sizes = FEW | {"sizes": [4, 8]}
    assert_step_scales(ranks, classify, build=lambda: residual_network(norm), batch=batch, **sizes)


def accuracy(model, batch, rank):
    import torchmetrics

    x, y = (rows[rank.index :: rank.size].to(rank.device) for rows in batch)
    metric = torchmetrics.Accuracy("multiclass", num_classes=3).to(rank.device)
    metric.update(model.to(rank.device)(x), y)
    return metric.compute()


def test_metrics(ranks):
    pytest.importorskip("torchmetrics")

    def batch(n):
        return (torch.randn(n, 6), torch.randint(0, 3, (n,)))

    sizes = FEW | {"sizes": [2, 3, 5, 8]}
    assert_metric_scales(ranks, accuracy, build=lambda: nn.Linear(6, 3), batch=batch, **sizes)
