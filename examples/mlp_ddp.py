"""An MLP with DistributedDataParallel: ``torchrun --nproc-per-node=4 mlp_ddp.py``."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 5))


def make_data(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(n, 20)
    return inputs, inputs[:, :5].argmax(dim=1)


class Trainer:
    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.device = device
        self.model = model.to(device)
        self.ddp = DDP(self.model, device_ids=[device.index])
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.1, momentum=0.9)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.ddp(inputs)

    def run_batch(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """One step on this rank's samples; the mean loss over those of all ranks."""
        inputs, labels = inputs.to(self.device), labels.to(self.device)
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.forward(inputs), labels)
        loss.backward()
        self.optimizer.step()
        logged = loss.detach().clone()
        dist.all_reduce(logged, op=dist.ReduceOp.AVG)
        return logged


def main(epochs: int = 3) -> None:
    dist.init_process_group("nccl")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    torch.manual_seed(0)
    dataset = TensorDataset(*make_data(1024))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=32, sampler=sampler, drop_last=True)
    trainer = Trainer(build(), device)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            loss = trainer.run_batch(inputs, labels)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
