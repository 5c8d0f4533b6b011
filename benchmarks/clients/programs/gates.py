"""The gate on what the clients train. The runner lays this file out as a test beside them; see `clients.GATES`."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from gpt import GPT, LENGTH, VOCABULARY
from images import residual_network
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from toy_ddp import Toy

from mgpu_check import assert_loader_covers, assert_metric_scales, assert_step_scales

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


def on_one_gpu(model, batch, rank):
    torch.cuda.set_device(0)  # ranks of the gate have each its own: as of a script that chooses none
    x, y = (whole.cuda() for whole in part(batch, rank))
    model = DistributedDataParallel(model.cuda())
    nn.functional.mse_loss(model(x), y).backward()


def test_toy_on_one_gpu(ranks):
    assert_step_scales(ranks, on_one_gpu, build=Toy, batch=lambda n: (torch.randn(n, 10), torch.randn(n, 5)), **FEW)


def on_the_cpu(model, batch, rank):
    x, y = (whole.chunk(rank.size)[rank.index] for whole in batch)
    if rank.size > 1:  # ranks of the gate have gloo, too: as of a script that asks for nccl
        model = DistributedDataParallel(model, process_group=dist.new_group(backend="nccl"))
    nn.functional.mse_loss(model(x), y).backward()


def test_toy_on_the_cpu(ranks):
    assert_step_scales(ranks, on_the_cpu, build=Toy, batch=lambda n: (torch.randn(n, 10), torch.randn(n, 5)), **FEW)


@pytest.mark.parametrize("advances", [True, False])
def test_loader(ranks, advances):
    def loader(rank):
        data = TensorDataset(torch.arange(32))
        sampler = DistributedSampler(data, rank.size, rank.index)
        batches = DataLoader(data, 16 // rank.size, sampler=sampler)
        for epoch in range(2):
            if advances:
                sampler.set_epoch(epoch)
            yield batches

    assert_loader_covers(ranks, loader, world_sizes=[2])


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


def replicated(model, batch, rank):
    images, labels = (whole.to("cuda:0") for whole in batch)
    model = nn.DataParallel(model.to("cuda:0"), device_ids=list(range(rank.size)))
    nn.functional.cross_entropy(model(images), labels).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def test_textbook(ranks):
    def build():
        return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4))

    def batch(n):
        return (torch.randn(n, 1, 8, 8), torch.randint(0, 4, (n,)))

    assert_step_scales(ranks, replicated, build=build, batch=batch, single_process=True, **FEW)


def in_shards(model, batch, rank):
    x, y = part(batch, rank)
    model.to(rank.device)
    mesh = init_device_mesh(rank.device.type, (rank.size,))
    for layer in (model.first, model.second, model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    nn.functional.mse_loss(model(x), y).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def test_fsdp(ranks):
    assert_step_scales(ranks, in_shards, build=Toy, batch=lambda n: (torch.randn(n, 10), torch.randn(n, 5)), **FEW)


def accuracy(model, batch, rank):
    import torchmetrics

    x, y = (rows[rank.index :: rank.size].to(rank.device) for rows in batch)
    metric = torchmetrics.Accuracy("multiclass", num_classes=3).to(rank.device)
    metric.update(model.to(rank.device)(x), y)
    return metric.compute()


def test_metrics(ranks):
    def batch(n):
        return (torch.randn(n, 6), torch.randint(0, 3, (n,)))

    sizes = FEW | {"sizes": [2, 3, 5, 8]}
    assert_metric_scales(ranks, accuracy, build=lambda: nn.Linear(6, 3), batch=batch, **sizes)
