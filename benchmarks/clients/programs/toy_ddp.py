"""As short examples of DistributedDataParallel are: they leave with a message where there are fewer than two GPUs."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(10, 10), nn.Linear(10, 5)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


def main():
    rank = int(os.environ["LOCAL_RANK"])
    accelerator = torch.accelerator.current_accelerator()
    torch.accelerator.set_device_index(rank)
    dist.init_process_group(backend=dist.get_default_backend_for_device(accelerator))
    model = DistributedDataParallel(Toy().to(rank), device_ids=[rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    optimizer.zero_grad()
    outputs = model(torch.randn(20, 10))  # from the CPU: the wrapper moves it
    nn.functional.mse_loss(outputs, torch.randn(20, 5).to(rank)).backward()
    optimizer.step()
    print(f"rank {rank} of {dist.get_world_size()} has trained")
    dist.destroy_process_group()


if __name__ == "__main__":
    if torch.accelerator.device_count() < 2:
        print("This example wants two GPUs. Good bye.")
        sys.exit()
    main()
