"""Train two models, one by an optimizer that raises now and then."""

import torch
from torch import nn

torch.manual_seed(0)


class Moody(torch.optim.SGD):
    mood = iter((False, True, False, True))

    def step(self, closure=None):
        if not next(self.mood):
            raise RuntimeError("out of memory")
        return super().step(closure)


first, second = nn.Linear(4, 2), nn.Linear(4, 2)
a, b = Moody(first.parameters(), lr=0.1), torch.optim.SGD(second.parameters(), lr=0.1)
for _ in range(4):
    for model, optimizer in ((first, a), (second, b)):
        optimizer.zero_grad()
        model(torch.randn(3, 4)).sum().backward()
        try:
            optimizer.step()
        except RuntimeError:
            pass
