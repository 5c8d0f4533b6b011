"""DTensor and its clients: fused products, autocast, and moves. The packaged suite trains with them, and with FSDP2."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


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


def test_products_that_overlap_their_collectives(on_ranks):
    on_ranks(overlapping_products)


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
