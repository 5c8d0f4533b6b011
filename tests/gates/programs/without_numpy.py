"""Tests of a user who has no NumPy."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from mgpu_check import assert_evaluation_agrees, assert_loader_covers, assert_resume_continues, assert_step_scales


def build():
    return nn.Linear(3, 1)


def batch(n):
    return torch.randn(n, 3)


def step(model, batch, rank):
    model.to(rank.device).zero_grad()
    x = batch[rank.index :: rank.size].to(rank.device)
    (model(x).square().sum() / len(batch)).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


def loader(rank):
    data = TensorDataset(torch.arange(24), torch.complex(torch.arange(24.0), torch.ones(24)))
    for epoch in range(2):
        sampler: DistributedSampler[Any] = DistributedSampler(data)
        sampler.set_epoch(epoch)
        yield DataLoader(data, batch_size=2, sampler=sampler)


def train(rank, directory, start, stop):
    model = build().to(rank.device)
    if start:
        model.load_state_dict(torch.load(directory / "model.pt", map_location=rank.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for k in range(start, stop):
        optimizer.zero_grad()
        step(model, torch.randn(8, 3, generator=torch.Generator().manual_seed(k)), rank)
        optimizer.step()
    dist.barrier()
    if rank.index == 0:
        torch.save(model.state_dict(), directory / "model.pt")
    dist.barrier()
    return model.state_dict()


def test_numpy_is_not_there(ranks):
    def missing():
        with pytest.raises(ImportError):
            importlib.import_module("numpy")
        with pytest.raises(RuntimeError, match="Numpy is not available"):
            torch.ones(1, device="cpu").numpy()

    ranks.run(missing)


def test_step(ranks):
    assert_step_scales(ranks, step, build=build, batch=batch, max_examples=5)


def test_loader(ranks):
    assert_loader_covers(ranks, loader)


def test_resume(ranks):
    assert_resume_continues(ranks, train)


def test_evaluation(ranks):
    def trained(model, batch, rank):
        step(model, batch, rank)
        torch.optim.SGD(model.parameters(), lr=0.1).step()

    assert_evaluation_agrees(ranks, trained, build=build, batch=batch)
