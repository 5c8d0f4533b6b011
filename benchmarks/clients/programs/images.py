"""As scripts for image classification are: DataParallel in one process, or ranks that it starts itself, or those of torchrun."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Block(nn.Module):
    def __init__(self, width, norm):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(width, width, 3, padding=1, bias=False), norm(width), nn.ReLU())

    def forward(self, x):
        return x + self.body(x)


def residual_network(norm="batch"):
    kind = {"batch": nn.BatchNorm2d, "group": lambda width: nn.GroupNorm(2, width)}[norm]
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, padding=1), Block(8, kind), Block(8, kind), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(8, 5))


def worker(gpu, count, given):
    distributed = given.multiprocessing_distributed or ("WORLD_SIZE" in os.environ and given.distributed)
    if given.multiprocessing_distributed:
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29872")
        dist.init_process_group("nccl", rank=gpu, world_size=count)
    elif distributed:
        gpu = int(os.environ["LOCAL_RANK"])
        dist.init_process_group("nccl")
    model = residual_network(given.norm)
    if distributed:
        torch.cuda.set_device(gpu)
        model = nn.parallel.DistributedDataParallel(model.cuda(gpu), device_ids=[gpu])
    else:
        model = nn.DataParallel(model).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)
    generator = torch.Generator().manual_seed(1)
    labels = torch.arange(24) % 5
    data = TensorDataset(torch.randn(24, 3, 8, 8, generator=generator), labels)
    sampler = DistributedSampler(data) if distributed else None
    loader = DataLoader(data, given.batch_size, shuffle=False, sampler=sampler)
    for epoch in range(2):
        if sampler is not None:
            sampler.set_epoch(epoch)
        model.train()
        for images, target in loader:
            images, target = images.cuda(non_blocking=True), target.cuda(non_blocking=True)
            loss = nn.functional.cross_entropy(model(images), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        schedule.step()
    if distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=12)
    parser.add_argument("--norm", default="batch")
    parser.add_argument("--distributed", action="store_true")
    parser.add_argument("--multiprocessing-distributed", action="store_true")
    options = parser.parse_args()
    if options.multiprocessing_distributed:
        mp.spawn(worker, nprocs=torch.cuda.device_count(), args=(torch.cuda.device_count(), options))
    else:
        worker(0, 1, options)
