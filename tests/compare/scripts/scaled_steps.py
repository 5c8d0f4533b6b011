"""Step a sharded optimizer by a scaler, which skips the second step."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

dist.init_process_group("gloo")
net = nn.Linear(2, 1)
optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
for scale in (1.0, float("inf"), 1.0):
    scaler.scale(net(torch.ones(3, 2)).sum() * scale).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
dist.destroy_process_group()
