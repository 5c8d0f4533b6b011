"""A model in training mode in a wrapper in evaluation mode, as Lightning leaves it after validation."""

import torch

net = torch.nn.DataParallel(torch.nn.Linear(2, 1))
net.eval()
net.module.train()
optimizer = torch.optim.SGD(net.parameters(), 0.1)
net(torch.ones(4, 2)).sum().backward()
optimizer.step()
