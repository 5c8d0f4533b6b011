"""Reduce gradients within the optimizer's step, which keeps the states of a rank's own rows only."""

import os

import torch
import torch.distributed as dist
from torch import nn

rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if world > 1:
    dist.init_process_group("gloo")


class Momentum(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                shared = world > 1 and len(p) % world == 0
                grad, rows = p.grad, p
                if world > 1:
                    grad = p.grad.clone()
                    dist.all_reduce(grad)
                    grad /= world
                if shared:
                    grad, rows = (whole.chunk(world)[rank] for whole in (grad, p))
                elif rank:  # a single row is on rank 0, and the others have padding
                    grad, rows = torch.zeros_like(grad), torch.zeros_like(p)
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(rows)
                state["momentum"].mul_(0.9).add_(grad)
                rows -= group["lr"] * state["momentum"]
                if shared:
                    dist.all_gather(list(p.chunk(world)), rows.clone())
                elif world > 1:
                    dist.broadcast(p, 0)


torch.manual_seed(0)
x = torch.randn(24, 6)
y = x.sum(1, keepdim=True).sin() * 3
net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = Momentum(net.parameters(), 0.05)
for start in (0, 8, 16):
    part = slice(start + rank, start + 8, world)
    optimizer.zero_grad()
    nn.functional.mse_loss(net(x[part]), y[part]).backward()
    optimizer.step()
