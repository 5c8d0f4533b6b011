"""Train on all GPUs in one process."""

import torch
from torch import nn

torch.manual_seed(0)
net = nn.DataParallel(nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1)).cuda())
optimizer = torch.optim.Adam(net.parameters())
for x in torch.randn(2, 8, 6).cuda():
    optimizer.zero_grad()
    net(x).square().mean().backward()
    optimizer.step()
