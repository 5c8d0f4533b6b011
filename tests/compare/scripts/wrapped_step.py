"""A training step that one device calls on the module itself, and ranks through the forward of a wrapper.

Words: masked (a mask and positions beside the batch), fsdp (FSDP is the wrapper), sum (of gradients, a mistake), other
(samples on ranks).
"""

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

words = sys.argv[1:]
if "RANK" in os.environ:
    dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
torch.manual_seed(0)
world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)


class Backbone(nn.Module):
    calls: torch.Tensor

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 2))
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, *tensors):
        self.calls += 1
        x = tensors[-1]
        for weights in tensors[:-1]:
            x = x * weights.float()
        return self.layers(x)


class Lit(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Backbone()

    def training_step(self, batch):
        x = batch["x"].flatten(1) / 2
        if "masked" not in words:
            return nn.functional.mse_loss(self.net(x), batch["y"])
        beside = [torch.ones(1, 6, dtype=torch.bool, device="cuda"), torch.arange(6, device="cuda")]
        return nn.functional.mse_loss(self.net(*beside, x), batch["y"])

    def forward(self, batch):
        return self.training_step(batch)


class Strategy(nn.Module):
    def __init__(self, module):
        super().__init__()
        self._forward_module = module

    def forward(self, *args):
        return self._forward_module(*args)


lit = Lit().cuda()
x, y = torch.randn(2, 2, 2, 3), torch.randn(2, 2, 2)
step: Any
if world == 1:
    step = lit.training_step
elif "fsdp" in words:
    step = fully_shard(lit)
else:
    step = DistributedDataParallel(Strategy(lit), broadcast_buffers=False)
optimizer = torch.optim.SGD(lit.parameters(), lr=0.1)
for inputs, targets in zip(x, y, strict=True):
    optimizer.zero_grad()
    if "other" in words and world > 1:
        inputs = inputs + 1
    loss = step({"x": inputs.chunk(world)[rank].cuda(), "y": targets.chunk(world)[rank].cuda()})
    if "sum" in words:
        loss = loss * world
    loss.backward()
    optimizer.step()
