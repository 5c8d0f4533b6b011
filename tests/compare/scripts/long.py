"""Train a small model for some epochs: ``long.py SEED [MISTAKE]``."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

seed, mistake = int(sys.argv[1]), (sys.argv[2:] or [""])[0]
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo")
torch.manual_seed(seed)
x = torch.randn(32, 6)
y = x.sum(1, keepdim=True).sin() * 3
net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.05 * (world if mistake == "rate" else 1), momentum=0.5)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 8, 0.8)
for epoch in range(4):
    order = torch.randperm(
        32, generator=torch.Generator().manual_seed(0 if mistake == "sampler" and world > 1 else epoch)
    )
    for start in range(0, 32, 8):
        own = order[start + rank : start + 8 : world]
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(net(x[own]), y[own])
        loss.backward()
        for p in net.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world
        optimizer.step()
        for _ in range(world if mistake == "schedule" else 1):
            schedule.step()
dist.destroy_process_group()
