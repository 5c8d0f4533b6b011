"""Use torch.distributed for more than one rank only, and average gradients by hand."""

import os

import torch
import torch.distributed as dist
from torch import nn

rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if world > 1:
    dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(24, 6)
y = x.sum(1, keepdim=True).sin() * 3
net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
for start in (0, 8, 16):
    part = slice(start + rank, start + 8, world)
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(net(x[part]), y[part])
    loss.backward()
    if world > 1:
        for p in net.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world
    nn.utils.clip_grad_norm_(net.parameters(), 0.5)
    optimizer.step()
