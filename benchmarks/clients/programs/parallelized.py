"""As examples of FSDP2, tensor and sequence parallel are: ``--how=fsdp``, ``tensor`` or ``sequence``."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Linear(10, 32), nn.Linear(32, 4)

    def forward(self, x):
        return self.leave(torch.relu(self.enter(x)))


def main(how):
    rank, world = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank)
    mesh = init_device_mesh("cuda", (world,))
    torch.manual_seed(0)
    if how == "fsdp":
        with torch.device("meta"):
            model = Toy()
        for layer in (model.enter, model.leave):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model.to_empty(device="cuda")
        with torch.no_grad():
            for number, parameter in enumerate(model.parameters()):
                whole = torch.linspace(-0.5, 0.5, parameter.numel(), device="cuda").reshape(parameter.shape)
                parameter.copy_(dist.tensor.distribute_tensor(whole * (1 + number), mesh, [Shard(0)]))
    else:
        first = ColwiseParallel(input_layouts=Shard(0)) if how == "sequence" else ColwiseParallel()
        last = RowwiseParallel(output_layouts=Shard(0)) if how == "sequence" else RowwiseParallel()
        model = parallelize_module(Toy().to("cuda"), mesh, {"enter": first, "leave": last})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, foreach=True)
    for number in range(3):
        torch.manual_seed(number)
        batch = torch.rand(8, 10, device="cuda")
        part = batch.chunk(world)[rank] if how in ("fsdp", "sequence") else batch
        optimizer.zero_grad()
        output = model(part)
        # Each rank of "sequence" has the whole loss of its part: a sum; FSDP averages over ranks.
        loss = output.square().mean() if how != "sequence" else output.square().sum() / (batch.shape[0] * 4)
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--how", choices=("fsdp", "tensor", "sequence"), required=True)
    main(parser.parse_args().how)
