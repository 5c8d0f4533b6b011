"""LeNet from bare parameters on several GPUs, by hand: copies of the parameters, all_reduce of gradients, SGD.

``torchrun --nproc-per-node=4 lenet_by_hand.py``; after the chapter on multiple GPUs of *Dive into Deep Learning*.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.nn import functional as F

RATE = 0.1

Parameters = dict[str, torch.Tensor]

SHAPES = {
    "W1": (6, 1, 3, 3),
    "b1": (6,),
    "W2": (16, 6, 5, 5),
    "b2": (16,),
    "W3": (16, 32),
    "b3": (32,),
    "W4": (32, 10),
    "b4": (10,),
}


def make_parameters(scale: float = 0.2) -> Parameters:
    return {name: torch.randn(shape) * scale for name, shape in SHAPES.items()}


def make_data(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    images = torch.randn(n, 1, 14, 14)
    return images, images[:, 0, 0, :10].argmax(dim=1)


def lenet(images: torch.Tensor, p: Parameters) -> torch.Tensor:
    hidden = F.avg_pool2d(F.relu(F.conv2d(images, p["W1"], p["b1"])), 2)
    hidden = F.avg_pool2d(F.relu(F.conv2d(hidden, p["W2"], p["b2"])), 2).flatten(1)
    hidden = F.relu(hidden @ p["W3"] + p["b3"])
    return hidden @ p["W4"] + p["b4"]


def replicate(parameters: Parameters, device: torch.device) -> Parameters:
    return {name: value.detach().clone().to(device).requires_grad_() for name, value in parameters.items()}


def synchronize(p: Parameters, batch_size: float) -> None:
    """Gradients that are summed over each rank's samples become those of the mean over the batch."""
    for value in p.values():
        dist.all_reduce(value.grad)
        value.grad /= batch_size


def sgd(p: Parameters, rate: float) -> None:
    with torch.no_grad():
        for value in p.values():
            value -= rate * value.grad


def train_batch(p: Parameters, images: torch.Tensor, labels: torch.Tensor, batch_size: int) -> None:
    """One step on this rank's part of a batch of `batch_size` samples; the part may be empty."""
    for value in p.values():
        value.grad = None
    F.cross_entropy(lenet(images, p), labels, reduction="sum").backward()
    synchronize(p, batch_size)
    sgd(p, RATE)


def main(steps: int = 5, batch_size: int = 64) -> None:
    dist.init_process_group("nccl")
    rank, size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    torch.manual_seed(0)  # alike on all ranks: they start from the same parameters
    p = replicate(make_parameters(), device)
    for step in range(steps):
        images, labels = (part.to(device) for part in make_data(batch_size))
        train_batch(p, images[rank::size], labels[rank::size], batch_size)
        if rank == 0:
            print(f"step {step}: loss {F.cross_entropy(lenet(images, p), labels).item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
