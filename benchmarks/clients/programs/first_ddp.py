"""A first script with DistributedDataParallel, under torchrun; each ``--mistake`` is one that is made in such
scripts."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

MISTAKES = ("", "device", "module", "order", "wrapper")


def main(mistake):
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("nccl")
    if mistake != "device":  # without it, all ranks train on the first GPU
        torch.cuda.set_device(rank)
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(32, 6), torch.randn(32, 1))
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    if mistake != "module" or world == 1:  # left on the CPU
        net = net.cuda()
    model = net if mistake == "wrapper" else DistributedDataParallel(net)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 16 // world, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        if mistake != "order":
            sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x.cuda()), y.cuda()).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--mistake", choices=MISTAKES, default="")
    main(parser.parse_args().mistake)
