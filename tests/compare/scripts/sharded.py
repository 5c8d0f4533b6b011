"""Step a parameter that is sharded over two ranks."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

mesh = init_device_mesh("cpu", (2,))
whole = torch.arange(12.0).reshape(6, 2)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))


net = Net()
net.weight.grad = distribute_tensor(2 * whole, mesh, [Shard(0)])
torch.optim.SGD(net.parameters(), lr=0.0).step()
