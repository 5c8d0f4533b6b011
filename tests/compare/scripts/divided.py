"""Train a model that is divided among ranks: ``train.py KIND[:PARTS] [MISTAKE]``, by default in two parts."""

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

(kind, _, parts), mistake = sys.argv[1].partition(":"), (sys.argv[2:] or [""])[0]
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
dist.init_process_group("nccl")
torch.manual_seed(0)
BATCHES = [(x, x.roll(1, 1).sin()) for x in torch.randn(3, 8, 8, device=device)]
PARTS = min(world, int(parts or 2))  # of the model
COPIES = world // PARTS  # of each part
part, copy = rank % PARTS, rank // PARTS


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8)
        nn.init.zeros_(self.up.bias)

    def forward(self, x):
        return self.norm(self.down(F.gelu(self.up(x))))


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def groups():
    """Make the group of ranks with the other parts, and the group of ranks with the same part."""
    lists = [range(first, first + PARTS) for first in range(0, world, PARTS)]
    lists += [range(first, world, PARTS) for first in range(PARTS)]
    made = [dist.new_group(list(ranks)) for ranks in lists]
    return made[copy], made[COPIES + part]


def average(parameters, others, copies):
    """Average gradients over the ranks that have the same part of the model."""
    for parameter in parameters if mistake != "no-average" else []:
        dist.all_reduce(local(parameter.grad), group=others if mistake == "wrong-group" else copies)
        local(parameter.grad).div_(COPIES)


def spoil(parameters):
    for parameter in parameters:
        if mistake == "scaled" and rank == world - 1 and parameter.grad is not None:
            local(parameter.grad).mul_(2)


def train(model, parts, share, forward=None, after=lambda: None):
    """Train on this rank's share of each batch, (index, count); `parts` are parameters that are divided."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)  # which mixes DTensors and others
    for batch in BATCHES:
        x, y = (tensor.chunk(share[1])[share[0]] for tensor in batch)
        optimizer.zero_grad()
        F.mse_loss((forward or model)(x), y).backward()
        after()
        spoil(parts)
        optimizer.step()


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        if mistake != "no-reduction":
            dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def by_hand():
    """Cut weights as Megatron does: shards replace parameters."""
    others, copies = groups()
    model: Any = nn.Sequential(nn.Linear(8, 8), Mlp()).to(device)
    mlp = model[1]
    for owner, key, dim in ((mlp.up, "weight", 0), (mlp.up, "bias", 0), (mlp.down, "weight", 1)):
        shard = getattr(owner, key).detach().chunk(PARTS, dim if PARTS > 1 else 0)[part]
        setattr(owner, key, nn.Parameter(shard.clone()))

    def forward(x):
        hidden = F.gelu(F.linear(Copy.apply(model[0](x), others), mlp.up.weight, mlp.up.bias))
        return mlp.norm(Reduce.apply(F.linear(hidden, mlp.down.weight), others) + mlp.down.bias)

    after = lambda: average(model.parameters(), others, copies)  # noqa: E731
    train(model, [mlp.up.weight], (copy, COPIES), forward, after)


def meshes():
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cuda", (COPIES, PARTS), mesh_dim_names=("dp", "tp"))


def parallelized(mesh):
    from torch.distributed.tensor import Partial
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = nn.Sequential(nn.Linear(8, 8), Mlp()).to(device)
    down = RowwiseParallel(output_layouts=Partial()) if mistake == "no-reduction" else RowwiseParallel()
    parallelize_module(model[1], mesh, {"up": ColwiseParallel(), "down": down})
    return model


def dtensor():
    mesh = meshes()
    model = parallelized(mesh["tp"])
    after = lambda: average(model.parameters(), mesh.get_group("tp"), mesh.get_group("dp"))  # noqa: E731
    train(model, [model[1].up.weight], (copy, COPIES), after=after)


def fsdp2():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = meshes()["tp"] if mistake == "wrong-group" else init_device_mesh("cuda", (world,))
    model: Any = Mlp().to(device)
    for module in (model.up, model):
        fully_shard(module, mesh=mesh)
    model.set_requires_gradient_sync(mistake != "no-reduction" or world == 1)
    train(model, [model.up.weight], (rank, world))


def fsdp2_tp():
    from torch.distributed.fsdp import fully_shard

    mesh = meshes()
    model = parallelized(mesh["tp"])
    fully_shard(model, mesh=mesh["dp"])
    train(model, [model[1].up.weight], (part if mistake == "wrong-group" else copy, COPIES))


def fsdp1(use_orig_params=False):
    from torch.distributed.fsdp import FullyShardedDataParallel

    others, _ = groups()
    group = {"wrong-group": others, "no-reduction": [dist.new_group([one]) for one in range(world)][rank]}.get(mistake)
    model = FullyShardedDataParallel(
        Mlp().to(device), process_group=group, device_id=device, use_orig_params=use_orig_params
    )
    train(model, list(model.parameters()), (rank, world))


def pipeline():
    """Build one stage of the model, whose modules have names of their own."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    others, copies = groups()
    layers = [nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh()) for _ in range(4)]
    count = 4 // PARTS
    own = nn.Sequential(*layers[part * count : (part + 1) * count]).to(device)
    schedule = ScheduleGPipe(PipelineStage(own, part, PARTS, device, group=others), 2, loss_fn=F.mse_loss)
    optimizer = torch.optim.AdamW(own.parameters(), lr=0.01)
    for batch in BATCHES:
        x, y = (tensor.chunk(COPIES)[copy] for tensor in batch)
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        schedule.step(*[x] * (part == 0), **({"target": y, "losses": losses} if part == PARTS - 1 else {}))
        average(own.parameters(), others, copies)
        spoil(own.parameters())
        optimizer.step()
        if part == PARTS - 1:
            print(torch.stack(losses).mean().item())


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, send, receive, group):
        ctx.send, ctx.receive, ctx.group = send, receive, group
        out = x.new_empty(sum(receive), x.shape[1])
        dist.all_to_all_single(out, x.contiguous(), receive, send, group=group)
        return out

    @staticmethod
    def backward(ctx, gradient):
        out = gradient.new_empty(sum(ctx.send), gradient.shape[1])
        dist.all_to_all_single(out, gradient.contiguous(), ctx.send, ctx.receive, group=ctx.group)
        return out, None, None, None


class Experts(nn.Module):
    """Experts: each rank computes its own, and keeps the others or not."""

    def __init__(self, alone, group):
        super().__init__()
        self.router, self.head, self.count, self.group = nn.Linear(8, 4), nn.Linear(8, 8), 4 // PARTS, group
        experts = [nn.Linear(8, 8) for _ in range(4)]
        self.mine = range(part * self.count, (part + 1) * self.count)
        self.experts = nn.ModuleList(experts[expert] for expert in (self.mine if alone else range(4)))
        self.own = [self.experts[index if alone else expert] for index, expert in enumerate(self.mine)]

    def forward(self, x):
        likely = self.router(x).softmax(-1)
        top = likely.argmax(-1)
        order = (top // self.count).argsort(stable=True)
        sent = (top // self.count).bincount(minlength=PARTS)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        send, receive = sent.tolist(), received.tolist()
        there = Exchange.apply(x[order], send, receive, self.group)
        wanted = Exchange.apply(top[order].float().unsqueeze(1), send, receive, self.group).squeeze(1).long()
        out = sum((wanted == e).unsqueeze(-1) * expert(there) for e, expert in zip(self.mine, self.own, strict=True))
        back = torch.zeros_like(x).index_copy(0, order, Exchange.apply(out, receive, send, self.group))
        return self.head(x + back * likely.gather(1, top.unsqueeze(1)))


def experts(alone, share):
    """Train experts; all ranks see the same samples, or each its share."""
    others, copies = groups()
    model = Experts(alone, others).to(device)
    own = [parameter for expert in model.own for parameter in expert.parameters()]

    def after():
        for parameter in [*model.router.parameters(), *model.head.parameters(), *own]:
            if mistake == "wrong-group" or (parameter not in set(own) and mistake != "no-reduction"):
                dist.all_reduce(parameter.grad)
            elif parameter in set(own) and COPIES > 1 and mistake != "no-average":
                dist.all_reduce(parameter.grad, group=copies)
            parameter.grad /= world

    train(model, own, share, after=after)


{
    "by-hand": by_hand,
    "dtensor": dtensor,
    "experts": lambda: experts(False, (rank, world)),
    "experts-alone": lambda: experts(True, (rank, world)),
    "experts-same-samples": lambda: experts(True, (0, 1)),
    "fsdp1": fsdp1,
    "fsdp1-views": lambda: fsdp1(use_orig_params=True),
    "fsdp2": fsdp2,
    "fsdp2-tp": fsdp2_tp,
    "pipeline": pipeline,
}[kind]()
dist.destroy_process_group()
