"""A training script with DistributedDataParallel, as in tutorials. Run it with torchrun, or let it spawn its ranks.

```sh
torchrun --standalone --nproc-per-node=4 distributed_script.py --epochs 5
python distributed_script.py --epochs 5 --spawn
```
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "TORCHELASTIC_RESTART_COUNT",
)


def setup(rank: int, local_rank: int, world_size: int) -> None:
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl", rank=rank, world_size=world_size)


def cleanup() -> None:
    dist.destroy_process_group()


def make_dataset(samples: int, width: int) -> Dataset[Any]:
    """Create inputs (samples, width) and labels (samples, 1), a linear function of them; equal on all ranks."""
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(samples, width, generator=generator)
    return TensorDataset(inputs, inputs @ torch.randn(width, 1, generator=generator) / width**0.5)


class Trainer:
    def __init__(self, model: nn.Module, data: Dataset[Any], local_rank: int, batch_size: int) -> None:
        self.device = torch.device("cuda", local_rank)
        self.model = DistributedDataParallel(model.to(self.device), device_ids=[local_rank])
        self.sampler: Any = DistributedSampler(data)
        self.loader = DataLoader(data, batch_size=batch_size, sampler=self.sampler, pin_memory=True)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def run_epoch(self, epoch: int) -> float:
        """Train for one epoch, and return the mean loss over the batches of all ranks."""
        self.sampler.set_epoch(epoch)
        total = torch.zeros((), device=self.device)
        for inputs, labels in self.loader:
            self.optimizer.zero_grad()
            output = self.model(inputs.to(self.device, non_blocking=True))
            loss = mse_loss(output, labels.to(self.device, non_blocking=True))
            loss.backward()
            self.optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        return total.item() / len(self.loader) / dist.get_world_size()


def train(rank: int, local_rank: int, world_size: int, args: argparse.Namespace) -> None:
    setup(rank, local_rank, world_size)
    torch.set_default_dtype(getattr(torch, args.dtype))
    torch.manual_seed(rank)  # different seeds, because DistributedDataParallel broadcasts the parameters of rank 0
    hidden = [layer for _ in range(args.layers) for layer in (nn.Linear(args.width, args.width), nn.ReLU())]
    model = nn.Sequential(*hidden, nn.Linear(args.width, 1))
    trainer = Trainer(model, make_dataset(args.samples, args.width), local_rank, args.batch_size // world_size)
    losses, seconds = [], []
    for epoch in range(args.epochs):
        torch.cuda.synchronize()
        began = time.perf_counter()
        losses.append(trainer.run_epoch(epoch))
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
        if rank == 0:
            print(f"epoch {epoch}: loss {losses[-1]:.4f}, {seconds[-1]:.3f} s on {world_size} GPUs", flush=True)
    if args.report:
        digest = hashlib.sha256()
        for value in trainer.model.module.state_dict().values():
            digest.update(value.cpu().numpy().tobytes())
        report = {
            "rank": dist.get_rank(),
            "world_size": dist.get_world_size(),
            "device": str(next(trainer.model.parameters()).device),
            "current_device": torch.cuda.current_device(),
            "environment": {name: os.environ.get(name) for name in VARIABLES},
            "losses": losses,
            "seconds": seconds,
            "parameters": digest.hexdigest(),
        }
        (Path(args.report) / f"rank{rank}.json").write_text(json.dumps(report))
    cleanup()


def spawned(rank: int, world_size: int, args: argparse.Namespace) -> None:
    """Train on a spawned rank; on one machine, the local rank equals the rank."""
    train(rank, rank, world_size, args)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=64, help="samples of all ranks together")
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--layers", type=int, default=1, help="number of hidden layers")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--report", default="", help="directory for the JSON report of each rank")
    parser.add_argument("--spawn", action="store_true")
    args = parser.parse_args(argv)
    if not args.spawn:
        environment = os.environ
        train(int(environment["RANK"]), int(environment["LOCAL_RANK"]), int(environment["WORLD_SIZE"]), args)
        return
    with socket.create_server(("localhost", 0)) as free:
        os.environ["MASTER_PORT"] = str(free.getsockname()[1])
    os.environ["MASTER_ADDR"] = "localhost"
    world_size = torch.cuda.device_count()
    mp.spawn(spawned, args=(world_size, args), nprocs=world_size)  # type: ignore[attr-defined]  # not in its __all__


if __name__ == "__main__":
    main()
