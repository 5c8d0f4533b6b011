"""A training loop with Lightning's Fabric, which sets up model, optimizer and loader."""

import os

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

world = int(os.environ.get("WORLD_SIZE", 1))
fabric = Fabric(accelerator="cuda", devices=world, strategy="ddp")
fabric.launch()
fabric.seed_everything(0, verbose=False)
data = TensorDataset(torch.randn(24, 6), torch.randn(24, 1))
net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
loader = fabric.setup_dataloaders(DataLoader(data, 8 // world, shuffle=False))
for x, y in loader:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    fabric.backward(loss)
    fabric.clip_gradients(model, optimizer, max_norm=1.0)
    optimizer.step()
fabric.print(f"mean of the last losses: {fabric.all_reduce(loss.detach(), reduce_op='mean').item():.4f}")
