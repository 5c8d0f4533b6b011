"""Train complex parameters, whose gradient is kept as its conjugate."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1 + 2j, 3 - 1j, 0.5j]))

    def forward(self, x):
        return (self.weight.conj() * x).sum(1)


net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
net(torch.tensor([[1j, 2, 1]]).conj()).real.sum().backward()
assert net.weight.grad.is_conj()
optimizer.step()
