"""Train two models with optimizers in turn; one of them in micro-batches, with a parameter that no module has."""

import torch
from torch import nn

torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 2)
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, x=None, mask=None):
        return self.body(x) * self.scale


net, other, loss_fn = Net(), Net(), nn.MSELoss()
loose = torch.zeros(1, requires_grad=True)
a = torch.optim.SGD([*net.parameters(), loose], lr=0.1)
b = torch.optim.Adam(other.parameters())
x = torch.randn(8, 3)
net.eval()
net(x=x)
net.train()  # validation is no step's
with torch.no_grad():
    net(x=x)
for part in x.split(4):
    (loss_fn(net(x=part), part[:, :2]) / 2).backward()
a.step()
a.zero_grad()
loss_fn(other(x=x), x[:, :2]).backward()
b.step()
torch.autograd.backward(net(x=x).sum())
torch.nn.utils.clip_grad_norm_(net.parameters(), 0.25)
a.step()
