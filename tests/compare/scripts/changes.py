"""Train a small model: ``train.py [CHANGE]``, where CHANGE is right, or is one mistake."""

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

change = (sys.argv[1:] or [""])[0]
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo")
torch.manual_seed(1 if change == "seed" else 0)
x = torch.randn(24, 6)
y = x.sum(1, keepdim=True).sin() * 3
inner, outer = ("encoder", "head") if change == "renamed" else ("first", "second")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.add_module(inner, nn.Linear(6, 8))
        self.add_module(outer, nn.Linear(8, 1))

    def forward(self, x):
        hidden = getattr(self, inner)(x).tanh()
        if change == "scaled-activation":
            hidden = hidden * 1.001
        return getattr(self, outer)(hidden)


net: Any = Net()
optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, foreach=change == "foreach")
if change == "other-optimizer":
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
parts = 2 if change in ("micro-batches", "not-divided") else 1
for step, start in enumerate((0, 8, 16)):
    first = 8 if change == "other-batch" and step == 1 else 0
    own = slice(start - first + rank, start - first + 8, world)
    optimizer.zero_grad()
    if change == "validated":
        with torch.no_grad():
            net(x)
    for a, b in zip(x[own].chunk(parts), y[own].chunk(parts), strict=True):
        loss = nn.functional.mse_loss(net(a), b)
        (loss / (1 if change == "not-divided" else parts)).backward()
    if change == "frozen" and step == 1:
        net.second.bias.grad.zero_()
    for p in net.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world if change != "summed" else 1
    if change == "learning-rate" and step == 2:
        optimizer.param_groups[0]["lr"] = 0.04
    if change == "momentum-lost" and step == 1:
        optimizer.state.clear()
    optimizer.step()
dist.destroy_process_group()
