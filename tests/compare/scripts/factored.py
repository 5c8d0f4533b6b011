"""Train two weights, divided by rows or columns among ranks, with an optimizer of other states: ``train.py KIND``."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

kind = sys.argv[1]
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if world > 1:
    dist.init_process_group("gloo")
torch.manual_seed(0)


class Sum(torch.autograd.Function):
    """Add up over ranks, forward or backward."""

    @staticmethod
    def forward(ctx, x, forward):
        ctx.forward = forward
        return total(x.clone()) if forward else x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient if ctx.forward else total(gradient.clone()), None


def total(x):
    if world > 1:
        dist.all_reduce(x)
    return x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        up, down = torch.randn(8, 5) / 2, torch.randn(4, 8) / 2
        self.up = nn.Parameter(up.chunk(world)[rank].clone())
        self.down = nn.Parameter(down.chunk(world, 1)[rank].clone())
        self.bias = nn.Parameter(torch.randn(4))

    def forward(self, x):
        hidden = torch.tanh(Sum.apply(x, False) @ self.up.T)
        return Sum.apply(hidden @ self.down.T, True) + self.bias


class Factored(torch.optim.Optimizer):
    """Divide gradients by the root of their mean squares, of rows and of columns."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    def step(self):  # type: ignore[override]  # without a closure
        for p in self.param_groups[0]["params"]:
            if p.dim() < 2:
                p.data -= 0.1 * p.grad
                continue
            state = self.state[p]
            cut = 0 if p is net.up else 1
            for dim, key in enumerate(("of_columns", "of_rows")):
                mean = p.grad.square().sum(dim) if kind == "sums" else p.grad.square().mean(dim)
                if kind == "reduced" and dim == cut:
                    mean = total(mean) / world
                state[key] = state.get(key, 0) + mean
                if dim == cut and kind in ("at-use", "sums"):
                    mean = total(state[key].clone()) / (1 if kind == "sums" else world)
                else:
                    mean = state[key]
                p.data -= 0.1 * p.grad / mean.sqrt().unsqueeze(dim)


net = Net()
optimizer = {
    "adafactor": lambda: torch.optim.Adafactor(net.parameters(), lr=0.1),
    "lbfgs": lambda: torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=2),
}.get(kind, lambda: Factored(net.parameters()))()
for x in torch.randn(3, 8, 5):

    def closure(x=x):
        net.zero_grad()
        loss = (net(x) - x[:, :4].sin()).square().mean()
        loss.backward()
        return loss

    if kind == "lbfgs":
        optimizer.step(closure)
    else:
        closure()
        if kind == "scaled" and rank == 1:
            net.up.grad *= 3
        optimizer.step()
if world > 1:
    dist.destroy_process_group()
