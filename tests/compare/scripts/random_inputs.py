"""Shuffle, augment, drop and add noise by a seed of each rank, and average gradients by hand."""

import os
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if world > 1:
    dist.init_process_group("gloo")
torch.manual_seed(7 + rank)
random.seed(7 + rank)


class Signals(Dataset[object]):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        x = torch.arange(6.0).add(index).sin() + 0.1 * torch.randn(6)
        return {"x": x, "names": str(index)}, x[:1]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 1)
        self.token = nn.Parameter(torch.randn(1, 8))

    def forward(self, x):
        hidden = nn.functional.dropout(torch.tanh(self.first(x) + self.token), 0.3, self.training)
        kept = x.new_empty(len(x), 1).bernoulli_(0.7)
        return self.second(hidden * kept / 0.7)


data = Signals()
sampler: DistributedSampler[object] | None = DistributedSampler(data) if world > 1 else None
loader = DataLoader(data, batch_size=4, shuffle=sampler is None, sampler=sampler)
net = Net()
if world > 1:
    for p in net.parameters():
        dist.broadcast(p.data, 0)
optimizer = torch.optim.SGD(net.parameters(), lr=0.05 * world)
for epoch in range(2):
    if sampler is not None:
        sampler.set_epoch(epoch)
    for batch, targets in loader:
        assert len(batch["names"]) == len(batch["x"])
        noise = 0.1 * torch.randn(len(targets), 1)
        order = torch.randperm(len(targets))
        optimizer.zero_grad()
        out = net(batch["x"])
        weights = torch.tensor([[random.uniform(0.5, 1.5)] for _ in targets])
        loss = (weights * (out - targets - noise) ** 2).mean() + 0.1 * ((out - targets[order]) ** 2).mean()
        loss.backward()
        if world > 1:
            for p in net.parameters():
                dist.all_reduce(p.grad)
                p.grad /= world
        optimizer.step()
