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


def refusing(name):
    def refuse(self, *args, **kwargs):
        raise RuntimeError(name)

    return refuse


class Strict:
    """Raises on what mgpu-check may not ask for."""

    __len__, __bool__ = refusing("len"), refusing("bool")


class Layer(nn.Linear):
    modules = 3
    named_buffers = state_dict = None
    __hash__ = object.__hash__
    __eq__, __bool__, __len__, __repr__, named_modules = map(refusing, ("eq", "bool", "len", "repr", "named_modules"))
    device_ids = property(refusing("device_ids"))

    def __init__(self, *args):
        super().__init__(*args)
        self.p = nn.Parameter(torch.zeros(2))  # "p" as in Dropout
        self.buffers = Strict()


class DropoutLayer(nn.Module):
    __repr__ = refusing("repr")

    def __init__(self):
        super().__init__()
        self.p = nn.Parameter(torch.zeros(2))
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x):
        self.seen += 1
        return x + self.p.sum()


class Tagged(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func not in (torch.Tensor.as_subclass, torch.Tensor.requires_grad.__get__):
            raise RuntimeError(f"torch function {func}")
        return super().__torch_function__(func, types, args, kwargs or {})

    __getattr__ = refusing("getattr")


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

    named_parameters = refusing("named_parameters")
    train = eval = refusing("train")


class Texts(Dataset):
    def __len__(self):
        return 32

    __bool__ = refusing("bool")

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(4, generator=generator), torch.randn(2, generator=generator)


class Momentum(torch.optim.SGD):
    __hash__ = object.__hash__
    __eq__, __len__, state_dict = map(refusing, ("eq", "len", "state_dict"))

    def zero_grad(self, keep):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None


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
