"""An MLP with residual blocks under FSDP2: ``torchrun --nproc-per-node=4 fsdp2.py``.

Parameters are sharded over the GPUs of a node and replicated over nodes (hybrid sharding); a node has two GPUs here.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

PER_NODE = 2


class Block(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(features)
        self.feed = nn.Sequential(nn.Linear(features, 2 * features), nn.GELU(), nn.Linear(2 * features, features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.feed(self.norm(x))


def build() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), Block(16), Block(16), nn.Linear(16, 3))


def make_data(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(n, 8)
    return inputs, 3 * inputs[:, :3].sin()


class Trainer:
    def __init__(self, model: nn.Sequential, device: torch.device) -> None:
        self.device = device
        self.model = model.to(device)
        gpus = min(PER_NODE, dist.get_world_size())
        self.shard(
            init_device_mesh(device.type, (dist.get_world_size() // gpus, gpus), mesh_dim_names=("nodes", "gpus"))
        )
        # After sharding: the optimizer is to hold the sharded parameters.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def shard(self, mesh: dist.DeviceMesh) -> None:
        for module in self.model:
            if isinstance(module, Block):
                fully_shard(module, mesh=mesh)
        fully_shard(self.model, mesh=mesh)  # what is in no block

    def run_batch(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        """One step on this rank's samples, equally many on each."""
        inputs, targets = inputs.to(self.device), targets.to(self.device)
        self.optimizer.zero_grad()
        nn.functional.mse_loss(self.model(inputs), targets).backward()
        self.optimizer.step()


def main(steps: int = 20) -> None:
    dist.init_process_group("nccl")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    torch.manual_seed(0)
    trainer = Trainer(build(), device)
    for step in range(steps):
        inputs, targets = (part.chunk(dist.get_world_size())[dist.get_rank()] for part in make_data(128))
        trainer.run_batch(inputs, targets)
        if step % 5 == 0:
            loss = nn.functional.mse_loss(trainer.model(inputs.to(device)), targets.to(device)).detach()
            dist.all_reduce(loss, op=dist.ReduceOp.AVG)
            if dist.get_rank() == 0:
                print(f"step {step}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
