"""As a chapter on several GPUs is: all of them found, a network initialized on the first, and DataParallel over all."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def all_gpus():
    return [torch.device(f"cuda:{i}") for i in range(torch.cuda.device_count())]


def initialize(module):
    if type(module) in (nn.Linear, nn.Conv2d):
        nn.init.normal_(module.weight, std=0.1)


def train(net, count, rate):
    data = TensorDataset(torch.randn(24, 1, 8, 8), torch.arange(24) % 4)
    loader = DataLoader(data, 12, shuffle=True)
    devices = all_gpus()[:count]
    net.apply(initialize)
    net = nn.DataParallel(net.to(devices[0]), device_ids=devices)
    trainer, loss = torch.optim.SGD(net.parameters(), rate), nn.CrossEntropyLoss()
    for _ in range(2):
        net.train()
        for x, y in loader:
            trainer.zero_grad()
            loss(net(x.to(devices[0])), y.to(devices[0])).backward()
            trainer.step()


torch.manual_seed(3)
train(nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4)), torch.cuda.device_count(), 0.1)
