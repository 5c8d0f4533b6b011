"""Give closures to optimizers, and then draw random numbers, compute in bfloat16, and save."""

import os

import torch
from torch import nn

torch.manual_seed(0)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(4, 4)

    def forward(self, x, dropout=0.0):
        y = nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=dropout)
        with torch.autocast("cpu", torch.bfloat16, enabled=dropout > 0):
            return self.out(y)


net, x = Attention(), torch.randn(2, 3, 4)
for optimizer in (torch.optim.SGD(net.parameters(), lr=0.1), torch.optim.LBFGS(net.parameters(), max_iter=3)):

    def closure(optimizer=optimizer):
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    optimizer.zero_grad()
    optimizer.step(closure=closure)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
optimizer.step()
net(x, 0.5).float().sum().backward()
if not os.path.exists("last.pt"):
    torch.save(net.state_dict(), "last.pt")
os.remove("last.pt")
