"""DistributedDataParallel on simulated devices."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.simulated.conftest import Passing


def in_half_precision(rank, size):
    """Views of buckets whose data C++ and Python exchange; what DistributedDataParallel is told to leave alone stays
    so."""
    from torch.nn.parallel.distributed import _MixedPrecision

    half = _MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float16, buffer_dtype=torch.float16)
    told = []
    for views, to_none in ((True, True), (True, False), (False, True)):
        net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
        net[1].register_parameter("alone", nn.Parameter(torch.ones(1)))
        with torch.no_grad():
            for p in net.parameters():
                p.fill_(1)
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["1.alone"])
        ddp = DistributedDataParallel(
            net.to(rank), device_ids=[rank], mixed_precision=half, gradient_as_bucket_view=views
        )
        for _ in range(3):
            ddp.zero_grad(set_to_none=to_none)
            ddp(torch.full((1, 2), rank + 1.0)).sum().backward()
        *trained, alone = ddp.parameters()
        assert alone is net[1].alone and not hasattr(alone, "_mp_param")
        assert {p.grad.dtype for p in trained} == {torch.float32}
        told.append([p.grad.tolist() for p in trained])
    return told


def test_distributed_data_parallel_in_mixed_precision(on_ranks):
    gradients = [[[1.5, 1.5]] * 3, [1.0] * 3, [[4.0] * 3], [1.0]]
    assert on_ranks(in_half_precision) == [[gradients] * 3] * 2


def compressed(rank, size):
    """Hooks that wait for collectives behind collectives."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    grads = []
    for hook in (default_hooks.fp16_compress_hook, powerSGD_hook.powerSGD_hook):
        torch.manual_seed(0)
        ddp = DistributedDataParallel(nn.Linear(8, 8).to(rank), device_ids=[rank])
        state = None
        if hook is powerSGD_hook.powerSGD_hook:
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=8, start_powerSGD_iter=2)
        ddp.register_comm_hook(state, hook)
        for _ in range(4):
            ddp.zero_grad()
            ddp(torch.eye(8)[rank * 4 : rank * 4 + 4].cuda()).square().sum().backward()
        grads.append(ddp.module.weight.grad.cpu())
    return [torch.allclose(grads[0], other, rtol=0.05, atol=0.05) for other in grads]


def test_hooks_that_compress(on_ranks):
    assert on_ranks(compressed) == [[True] * 2] * 2


def buffers_averaged(rank, size):
    """A hook for buffers, whose futures C++ waits for at the end of backward."""
    net = nn.BatchNorm1d(2, momentum=1.0).to(rank)
    ddp = DistributedDataParallel(net, device_ids=[rank])

    def average(state, buffers):
        works = [dist.all_reduce(b, async_op=True) for name, b in buffers.items() if name == "running_mean"]
        return [work.get_future() for work in works]

    ddp._register_buffer_comm_hook(None, average)
    ddp(torch.full((2, 2), rank + 1.0, device="cuda")).sum().backward()
    return net.running_mean.tolist()


def joined(rank, size):
    from torch.distributed.algorithms.join import Join

    ddp = DistributedDataParallel(nn.Linear(1, 1, bias=False).to(rank), device_ids=[rank])
    seen = []
    for whole in (True, False):
        with Join([ddp], divide_by_initial_world_size=whole):
            for _ in range(1 + rank):
                ddp.zero_grad()
                ddp(torch.ones(1, 1)).sum().backward()
        seen.append(ddp.module.weight.grad.item())
    return seen


def trained_under_a_mode(rank, size):
    ddp = DistributedDataParallel(nn.Linear(1, 1, bias=False).to(rank), device_ids=[rank])
    with Passing():  # the reducer's plain buckets then come by way of Python
        ddp(torch.full((1, 1), float(rank + 1))).sum().backward()
    return ddp.module.weight.grad.item()


def restored(rank, size):
    ddp = DistributedDataParallel(nn.Linear(2, 2).to(rank), device_ids=[rank])
    F.mse_loss(ddp(torch.ones(1, 2)), torch.ones(1, 2).cuda()).backward()
    weight = ddp.module.weight
    saved = {name: torch.full_like(value, 5.0, device="cpu") for name, value in ddp.state_dict().items()}
    ddp.load_state_dict(saved)
    return ddp.module.weight is weight, weight.device.index, weight.tolist()


def of_small_modules(rank, size):
    return [body(rank, size) for body in (buffers_averaged, joined, trained_under_a_mode, restored)]


def test_buffers_uneven_inputs_modes_and_checkpoints_of_wrapped_modules(on_ranks):
    for rank, found in enumerate(on_ranks(of_small_modules)):
        assert found == [[3, 3], [[1, 1], [0.5, 1]][rank], 1.5, (True, rank, [[5, 5], [5, 5]])]
