"""Train a model whose layers keep running means, divided among ranks: ``train.py KIND [MISTAKE]``."""

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

kind, mistake = sys.argv[1], (sys.argv[2:] or [""])[0]
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
dist.init_process_group("nccl")
torch.manual_seed(0)
BATCHES = [(x, x.roll(1, 1).sin()) for x in torch.randn(3, 8, 8, device=device)]
PARTS = min(world, 2)  # of the model
COPIES = world // PARTS  # of each part
part, copy = rank % PARTS, rank // PARTS
lists = [range(first, first + PARTS) for first in range(0, world, PARTS)]
lists += [range(first, world, PARTS) for first in range(PARTS)]
made = [dist.new_group(list(ranks)) for ranks in lists]
others, copies = made[copy], made[COPIES + part]


class Mean(nn.Module):
    """Subtract the running mean of each feature. It begins with constants, which show no slice."""

    running: torch.Tensor

    def __init__(self, count):
        super().__init__()
        self.register_buffer("running", torch.zeros(count))
        self.scale = nn.Parameter(torch.ones(count))

    def forward(self, x):
        mean = x.detach().mean(0)
        dist.all_reduce(mean, group=copies)
        self.running.lerp_(mean / COPIES, 0.1)
        return (x - self.running) * self.scale


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=others)
        return gradient


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x, group=others)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def average(parameters):
    for parameter in parameters:
        dist.all_reduce(parameter.grad, group=copies)
        parameter.grad /= COPIES


def optimizer_of(model, spoiled):
    rate = 0.01 * (3 if mistake == "rate" and world > 1 else 1)
    made = torch.optim.AdamW(model.parameters(), lr=rate)
    steps = []

    def spoil(optimizer, *_):
        steps.append(1)
        if mistake == "state" and rank == world - 1 and len(steps) == len(BATCHES):
            optimizer.state[spoiled]["exp_avg"].mul_(2)
        if mistake == "lost-state" and len(steps) == 1:
            optimizer.state[spoiled]["exp_avg"].zero_()

    if world > 1:
        made.register_step_post_hook(spoil)
    return made


def slices():
    """Cut weights, biases and running means by hand."""
    model: Any = nn.Sequential(nn.Linear(8, 16), Mean(16), nn.Linear(16, 8), nn.LayerNorm(8)).to(device)
    up, mean, down, norm = model
    for owner, key, dim in ((up, "weight", 0), (up, "bias", 0), (mean, "scale", 0), (down, "weight", 1)):
        shard = getattr(owner, key).detach().chunk(PARTS, dim)[part]
        setattr(owner, key, nn.Parameter(shard.clone()))
    mean.running = mean.running.chunk(PARTS)[part].clone()
    optimizer = optimizer_of(model, up.weight)
    for step, batch in enumerate(BATCHES):
        x, y = (tensor.chunk(COPIES)[copy] for tensor in batch)
        optimizer.zero_grad()
        hidden = F.gelu(mean(F.linear(Copy.apply(x), up.weight, up.bias)))
        out = norm(Reduce.apply(F.linear(hidden, down.weight)) + down.bias)
        F.mse_loss(out, y).backward()
        average(model.parameters())
        if mistake == "scaled" and rank == world - 1 and world > 1:
            mean.scale.grad *= 2
        if mistake == "buffer" and step == len(BATCHES) - 1 and rank == world - 1:
            mean.running += 1
        optimizer.step()


def stages():
    """Build one stage of the model, whose modules have names of their own."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    layers = [nn.Sequential(nn.Linear(8, 8), Mean(8), nn.Tanh()) for _ in range(4)]
    count = 4 // PARTS
    own: Any = nn.Sequential(*layers[part * count : (part + 1) * count]).to(device)
    example = torch.zeros(
        4, 8, device=device, requires_grad=True
    )  # of a micro-batch: without it the stage runs on what memory has
    stage = PipelineStage(own, part, PARTS, device, example, example, group=others)
    schedule = ScheduleGPipe(stage, 2, loss_fn=F.mse_loss)
    optimizer = optimizer_of(own, own[0][0].weight)
    for x, y in BATCHES:
        optimizer.zero_grad()
        schedule.step(*[x] * (part == 0), **({"target": y, "losses": []} if part == PARTS - 1 else {}))
        optimizer.step()


def zero():
    """Keep the state of each parameter on one rank."""
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)).to(device)
    ddp = DistributedDataParallel(model, device_ids=[device.index])
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), optimizer_class=torch.optim.Adam, lr=0.01)
    for step, (x, y) in enumerate(BATCHES):
        optimizer.zero_grad()
        F.mse_loss(ddp(x.chunk(world)[rank]), y.chunk(world)[rank]).backward()
        if mistake == "state" and world > 1 and step == len(BATCHES) - 1:
            for state in optimizer.optim.state.values():
                state["step"] += 1
        optimizer.step()


{"slices": slices, "stages": stages, "zero": zero}[kind]()
dist.destroy_process_group()
