# mypy: ignore-errors
"""A model, an optimizer and a dataset whose authors have replaced or overridden what torch gives them."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

if "RANK" in os.environ:
    dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
torch.manual_seed(0)
world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)


class Strict:
    """Raises on what mgpu-check may not ask for."""

    def __len__(self):
        raise RuntimeError("len")

    def __bool__(self):
        raise RuntimeError("bool")


class Layer(nn.Linear):
    modules = 3
    named_buffers = state_dict = None

    def __init__(self, *args):
        super().__init__(*args)
        self.p = nn.Parameter(torch.zeros(2))  # "p" as in Dropout
        self.buffers = Strict()

    def named_modules(self):
        raise RuntimeError("named_modules")

    def __eq__(self, other):
        raise RuntimeError("eq")

    __hash__ = object.__hash__

    def __bool__(self):
        raise RuntimeError("bool")

    def __len__(self):
        raise RuntimeError("len")

    def __repr__(self):
        raise RuntimeError("repr")

    @property
    def device_ids(self):
        raise RuntimeError("device_ids")


class DropoutLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.p = nn.Parameter(torch.zeros(2))
        self.register_buffer("seen", torch.zeros(1))

    def __repr__(self):
        raise RuntimeError("repr")

    def forward(self, x):
        self.seen += 1
        return x + self.p.sum()


class Tagged(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func not in (torch.Tensor.as_subclass, torch.Tensor.requires_grad.__get__):
            raise RuntimeError(f"torch function {func}")
        return super().__torch_function__(func, types, args, kwargs or {})

    def __getattr__(self, name):
        raise RuntimeError(f"getattr {name}")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = Layer(4, 8), DropoutLayer(), Layer(8, 2)

    def forward(self, x):
        x = x.as_subclass(torch.Tensor).cuda()
        return self.last(self.middle(self.first(x).tanh())) + 0 * (self.first.p.sum() + self.last.p.sum())

    def parameters(self, *, lr=None):
        assert lr is not None, "parameters needs lr"
        some = [self.first.weight, self.first.bias, self.first.p, self.last.p, self.middle.p]
        return [{"params": some, "lr": lr}, {"params": [self.last.weight, self.last.bias]}]

    def named_parameters(self, *args, **kwargs):
        raise RuntimeError("named_parameters")

    def train(self):
        raise RuntimeError("train")

    eval = train


class Texts(Dataset):
    def __len__(self):
        return 32

    def __bool__(self):
        raise RuntimeError("bool")

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(4, generator=generator), torch.randn(2, generator=generator)


class Momentum(torch.optim.SGD):
    def zero_grad(self, keep):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None

    def state_dict(self):
        raise RuntimeError("state_dict")

    def __eq__(self, other):
        raise RuntimeError("eq")

    def __hash__(self):
        return 2

    def __len__(self):
        raise RuntimeError("len")


net = Net().cuda()
optimizer = Momentum(net.parameters(lr=0.1), lr=0.2, momentum=0.9)
data = Texts()
sampler = DistributedSampler(data, world, rank, shuffle=False)
for x, y in DataLoader(data, batch_size=8 // world, sampler=sampler):
    loss = nn.functional.mse_loss(net(x.as_subclass(Tagged)), y.cuda())
    loss.backward()
    if world > 1:
        for group in optimizer.param_groups:
            for p in group["params"]:
                dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)
    optimizer.step()
    optimizer.zero_grad("all")
