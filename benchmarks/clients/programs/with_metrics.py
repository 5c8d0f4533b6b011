"""An evaluation with torchmetrics, synchronized over ranks, after a step of training."""

import os

import torch
import torch.distributed as dist
import torchmetrics
from torch import nn

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
torch.manual_seed(0)
x, y = torch.randn(24, 6), torch.arange(24) % 3
model = nn.parallel.DistributedDataParallel(nn.Linear(6, 3).cuda(), device_ids=[rank])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for part in range(2):
    mine = slice(part * 12 + rank, (part + 1) * 12, world)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x[mine].cuda()), y[mine].cuda()).backward()
    optimizer.step()
model.eval()
accuracy = torchmetrics.Accuracy("multiclass", num_classes=3).cuda()
mean = torchmetrics.MeanMetric().cuda()
with torch.no_grad():
    for start in range(rank, 24, world):
        scores = model.module(x[start : start + 1].cuda())
        accuracy.update(scores, y[start : start + 1].cuda())
        mean.update(nn.functional.cross_entropy(scores, y[start : start + 1].cuda()))
whole = (model.module(x.cuda()).argmax(1) == y.cuda()).float().mean()
assert abs(accuracy.compute() - whole) < 1e-6, (accuracy.compute(), whole)
print(f"accuracy {accuracy.compute().item():.4f}, loss {mean.compute().item():.4f}")
dist.destroy_process_group()
