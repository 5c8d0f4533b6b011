"""DTensor and its clients: tensor parallel training, also with fused products, and FSDP2 of a model built on 'meta'."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


class Perceptron(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(10, 32), nn.Linear(32, 5)

    def forward(self, x):
        return self.second(F.relu(self.first(x)))


def overlapping_products(rank, size):
    import torch.distributed as dist
    from torch.distributed import _symmetric_memory  # noqa: F401  # registers the operators

    assert dist.group.WORLD is not None
    name = dist.group.WORLD.group_name
    parts = [torch.arange(12.0).reshape(4, 3) + 100 * other for other in range(size)]
    factor = torch.arange(6.0).reshape(3, 2)
    operators = torch.ops.symm_mem
    whole, (made,) = operators.fused_all_gather_matmul(parts[rank].cuda(), [factor.cuda()], 0, name)
    columns, _ = operators.fused_all_gather_matmul(parts[rank].cuda(), [factor.repeat(size, 1).cuda()], 1, name)
    scattered = operators.fused_matmul_reduce_scatter(parts[rank].cuda(), factor.cuda(), "sum", 0, name)
    assert torch.equal(whole.cpu(), torch.cat(parts))
    assert torch.equal(made.cpu(), torch.cat(parts) @ factor)
    assert torch.equal(columns.cpu(), torch.cat(parts, 1))
    assert torch.equal(scattered.cpu(), (torch.stack(parts).sum(0) @ factor).chunk(size)[rank])


def tensor_parallel(rank, size):
    overlapping_products(rank, size)  # here, because starting ranks takes seconds
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    reference = Perceptron()
    plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
    net: Any = parallelize_module(copy.deepcopy(reference).cuda(), init_device_mesh("cuda", (size,)), plan)
    weight = net.first.weight
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1, foreach=True) for m in (reference, net)]
    for step in range(3):
        x = torch.rand(20, 10, generator=torch.Generator().manual_seed(step))
        reference(x).square().mean().backward()
        out = net(x.cuda())
        out.square().mean().backward()
        for p, q in zip(net.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor().cpu(), q.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return weight.device.index, weight.is_cuda, weight.get_device(), weight.grad, out.get_device()


def test_tensor_parallel_training(on_ranks):
    assert on_ranks(tensor_parallel) == [(0, True, 0, None, 0), (1, True, 1, None, 1)]


def from_meta(rank, size):
    from torch.distributed.fsdp import fully_shard

    with torch.device("meta"):
        net: Any = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    for layer in (net[0], net[2], net):
        fully_shard(layer)
    assert net[0].weight.device.type == "meta"
    net.to_empty(device="cuda")
    torch.cuda.manual_seed(1)
    for layer in (net[0], net[2]):
        layer.reset_parameters()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    whole = [p.full_tensor().cpu() for p in net.parameters()]
    reference = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    with torch.no_grad():
        for p, value in zip(reference.parameters(), whole, strict=True):
            p.copy_(value)
    x = torch.rand(2 * size, 4, generator=torch.Generator().manual_seed(0))
    reference(x).square().mean().backward()
    net(x[2 * rank : 2 * rank + 2].cuda()).square().mean().backward()
    for p, q in zip(net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor().cpu(), q.grad)
    optimizer.step()
    weight = net[0].weight
    return weight.device.index, weight.to_local().device.index, whole[0].tolist(), len(whole[0].unique())


def test_fully_shard_of_a_model_from_meta(on_ranks):
    first, second = on_ranks(from_meta)
    assert first[:2] == (0, 0) and second[:2] == (1, 1)
    assert first[2] == second[2] and first[3] == 32  # every shard has numbers of its own


def under_autocast(rank, size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cuda", (size,))
    weight = distribute_tensor(torch.randn(4, 4).cuda(), mesh, [Shard(0)])
    with torch.autocast("cuda", torch.bfloat16):
        first: Any = F.linear(distribute_tensor(torch.randn(2, 4).cuda(), mesh, [Replicate()]), weight)
        return first.dtype, F.linear(first.redistribute(mesh, [Replicate()]), weight).dtype


def test_autocast_casts_dtensors(on_ranks):
    assert on_ranks(under_autocast) == [(torch.bfloat16, torch.bfloat16)] * 2


def on_the_host(rank, size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    whole: Any = distribute_tensor(torch.arange(4.0).cuda(), init_device_mesh("cuda", (size,)), [Shard(0)])
    whole.requires_grad_()
    for host in (whole.cpu(), whole.to("cpu"), whole.to("cpu", torch.float64)):
        assert host.is_cpu and host.device == host.to_local().device == torch.device("cpu")
        assert host.to_local().tolist() == [2.0 * rank, 2.0 * rank + 1] and host.placements == whole.placements
        whole.grad = None
        host.to_local().sum().backward()
        assert whole.grad.is_cuda and whole.grad.to_local().tolist() == [1, 1]
    return host.dtype, host.cuda().to_local().get_device()


def pending_results(rank, size):
    from torch.distributed import _functional_collectives as functional
    from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_reduce

    group = torch.distributed.group.WORLD

    def pending():
        made = all_reduce(torch.ones(3).cuda(), "sum", group)
        assert isinstance(made, AsyncCollectiveTensor)
        return made

    there = torch.device("cuda", (rank + 1) % size)
    copies = [
        *(pending().cpu(), pending().to("cpu"), pending().to("cpu", torch.float64), pending().to(there)),
        *(torch.zeros(3).copy_(pending()), torch.zeros(3, device=there).copy_(pending().view(3, 1).reshape(-1))),
    ]
    assert not any(isinstance(copy, AsyncCollectiveTensor) for copy in copies)
    twice = pending()
    torch.distributed.all_reduce(twice)
    weight = torch.ones(2, device="cuda", requires_grad=True)
    older = "all_gather_tensor_autograd"  # torch 2.13 warns of this name
    gather = getattr(functional, "all_gather_single_autograd", None) or getattr(functional, older)
    gather(weight * 3, 0, group).cpu().sum().backward()
    assert weight.grad is not None and weight.grad.is_cuda
    return (
        [copy.tolist() for copy in copies],
        [copy.device.type for copy in copies],
        twice.tolist(),
        weight.grad.tolist(),
    )


def wrappers(rank, size):
    from torch.testing._internal.two_tensor import TwoTensor

    two = TwoTensor(torch.ones(2, device="cuda"), torch.zeros(2, device="cuda"))
    moved: list[Any] = [two.cpu(), two.to("cpu"), two.cpu().cuda(), two.to(torch.device("cuda", (rank + 1) % size))]
    return [(str(one.device), str(one.a.device), one.a.tolist()) for one in moved]


def moves(rank, size):
    return on_the_host(rank, size), pending_results(rank, size), wrappers(rank, size)


def test_distributed_tensors_pending_results_and_wrappers_move_with_what_they_have(on_ranks):
    kinds = ["cpu", "cpu", "cpu", "cuda", "cpu", "cuda"]
    for rank, found in enumerate(on_ranks(moves)):
        assert found == (
            (torch.float64, rank),
            ([[2, 2, 2]] * 6, kinds, [4, 4, 4], [6, 6]),
            [(place, place, [1, 1]) for place in ("cpu", "cpu", f"cuda:{rank}", f"cuda:{1 - rank}")],
        )
