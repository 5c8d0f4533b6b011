"""Kinds of right scripts, or of one mistake, that need something of their own."""

import os
import sys
import threading

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

kind = sys.argv[1]
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
address = "env://" if kind == "slices" else f"tcp://[::1]:{os.environ['MASTER_PORT']}"  # the launcher's store
dist.init_process_group("nccl", init_method=address, rank=rank, world_size=world)
torch.cuda.set_device(rank)


class Sketched(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        for i, p in enumerate(self.param_groups[0]["params"]):
            if i % world == rank:  # the share of this rank
                p -= 0.1 * p.grad * torch.rand_like(p)
            dist.broadcast(p, i % world)


class Divided(nn.Linear):  # each rank draws its rows
    def __init__(self):
        super().__init__(8, 8 // world, bias=False)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return super().forward(x * self.scale)


def train(sampler, net):
    data = TensorDataset(torch.randn(64, 8, generator=torch.Generator().manual_seed(1)))
    optimizer = (Sketched if kind == "update" else torch.optim.SGD)(net.parameters(), lr=0.1)
    for (x,) in DataLoader(data, 8 if kind in ("whole", "slices") else 8 // world, sampler=sampler, shuffle=False):
        x = x.to(next(net.parameters()))  # a thread has a current device of its own
        noise = torch.randn(len(x)).type_as(x)[:, None] if kind == "thread" else 0
        optimizer.zero_grad()
        (net(x + noise).float() ** 2).mean().backward()
        for p in [net.scale] if kind == "slices" else net.parameters() if kind in ("update", "narrow") else ():
            dist.all_reduce(p.grad)
            p.grad /= 1 if kind == "narrow" else world
        optimizer.step()


torch.manual_seed(rank if kind == "slices" else 0)
net: nn.Module = (Divided() if kind == "slices" else nn.Linear(8, 8)).cuda()
if kind == "thread":
    net = nn.parallel.DistributedDataParallel(net)
elif kind == "whole":
    fully_shard(net)
net = net.bfloat16() if kind == "narrow" else net
if world > 1 and kind not in ("whole", "slices"):
    own: object = DistributedSampler(TensorDataset(torch.empty(64)), shuffle=False)
    thread = threading.Thread(target=train, args=(own, net))
else:
    thread = threading.Thread(target=lambda: train(None, net))
thread.start()
thread.join()
