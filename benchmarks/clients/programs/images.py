"""As scripts for image classification are: DataParallel in one process, or ranks that it starts itself, or those of
torchrun."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


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


class AverageMeter:
    """A sum and a count, and their quotient over all ranks."""

    def __init__(self, name):
        self.name, self.sum, self.count = name, 0.0, 0

    def update(self, value, n):
        self.sum += float(value) * n
        self.count += n

    def all_reduce(self):
        total = torch.tensor([self.sum, self.count], dtype=torch.float32, device="cuda")
        dist.all_reduce(total, dist.ReduceOp.SUM, async_op=False)
        self.sum, self.count = total.tolist()

    def __str__(self):
        return f"{self.name} {self.sum / max(self.count, 1):.4f}"


def accuracy(output, target, topk):
    """The percentages of samples whose target is among the k largest."""
    with torch.no_grad():
        right = output.topk(max(topk), 1, True, True)[1].t().eq(target.view(1, -1))
        return [right[:k].reshape(-1).float().sum() * (100.0 / len(target)) for k in topk]


def train(loader, model, criterion, optimizer, gpu):
    loss_meter, top1 = AverageMeter("loss"), AverageMeter("acc@1")
    model.train()
    for images, target in loader:
        images, target = images.cuda(gpu, non_blocking=True), target.cuda(gpu, non_blocking=True)
        output = model(images)
        loss = criterion(output, target)
        loss_meter.update(loss.item(), len(images))
        top1.update(accuracy(output, target, (1,))[0], len(images))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return f"{loss_meter}, {top1}"


def validate(loader, model, criterion, gpu, distributed):
    meters = [AverageMeter(name) for name in ("loss", "acc@1", "acc@3")]

    def run(batches):
        with torch.no_grad():
            for images, target in batches:
                images, target = images.cuda(gpu, non_blocking=True), target.cuda(gpu, non_blocking=True)
                output = model(images)
                values = [criterion(output, target), *accuracy(output, target, (1, 3))]
                for meter, value in zip(meters, values, strict=True):
                    meter.update(value, len(images))

    model.eval()
    run(loader)
    if distributed:
        for meter in meters:
            meter.all_reduce()
        seen = len(loader.sampler) * dist.get_world_size()
        if seen < len(loader.dataset):  # what the sampler has left out, every rank does for itself
            run(DataLoader(Subset(loader.dataset, range(seen, len(loader.dataset))), loader.batch_size))
    return ", ".join(map(str, meters))


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
    criterion = nn.CrossEntropyLoss().cuda(gpu)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(24, 3, 8, 8, generator=generator), torch.arange(24) % 5)
    unseen = TensorDataset(torch.randn(13, 3, 8, 8, generator=generator), torch.arange(13) % 5)
    sampler = DistributedSampler(data) if distributed else None
    unseen_sampler = DistributedSampler(unseen, shuffle=False, drop_last=True) if distributed else None
    loader = DataLoader(data, given.batch_size, shuffle=False, sampler=sampler, pin_memory=True)
    unseen_loader = DataLoader(unseen, given.batch_size, shuffle=False, sampler=unseen_sampler, pin_memory=True)
    for epoch in range(2):
        if sampler is not None:
            sampler.set_epoch(epoch)
        trained = train(loader, model, criterion, optimizer, gpu)
        validated = validate(unseen_loader, model, criterion, gpu, distributed)
        schedule.step()
        if not distributed or gpu == 0:
            print(f"epoch {epoch}: {trained}; validated: {validated}")
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
