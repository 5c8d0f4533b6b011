"""torch.distributed between simulated devices of several processes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mgpu_check.simulated import simulated_node


def filled(rank, *shape):
    return torch.full(shape or (2,), float(rank + 1), device="cuda")


def beyond_gloo(rank, size):
    """What NCCL has and gloo has not."""
    seen: dict[str, Any] = {"name": dist.group.WORLD._get_backend(torch.device("cuda")).name()}
    rows = [torch.zeros(n + 1, device="cuda") for n in range(size)]
    dist.all_gather(rows, filled(rank, rank + 1))
    seen["uneven all_gather"] = [row.tolist() for row in rows]
    part = torch.zeros(rank + 1, device="cuda")
    dist.reduce_scatter(part, [filled(rank, n + 1) for n in range(size)])
    seen["uneven reduce_scatter"] = part.tolist()
    rows = [torch.zeros(rank + n + 1, 2, device="cuda") for n in range(size)]
    dist.all_to_all(rows, [filled(rank, rank + n + 1, 2) for n in range(size)])
    seen["uneven all_to_all"] = [(len(row), row.unique().tolist()) for row in rows]
    mine, other = torch.zeros(1, device="cuda"), torch.zeros(1, device="cuda")
    messages = [
        dist.P2POp(dist.irecv, mine, rank),
        dist.P2POp(dist.irecv, other, 1 - rank),
        dist.P2POp(dist.isend, filled(rank, 1), rank),
        dist.P2POp(dist.isend, filled(rank, 1), 1 - rank),
    ]
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    seen["to oneself"] = mine.item(), other.item()
    one, two = filled(rank, 1), filled(rank, 3)
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
        dist.all_reduce(one)
        dist.all_reduce(two)
    early = one.isnan().item()
    manager.wait()
    seen["coalesced"] = early, one.item(), two.tolist()
    x = filled(rank)
    dist.all_reduce(x, op=dist._make_nccl_premul_sum(3.0))  # type: ignore[attr-defined]
    seen["factor"] = x.tolist()
    seen["bool"] = torch.tensor([rank == 0, False], device="cuda")
    dist.all_reduce(seen["bool"])
    seen["bool"] = seen["bool"].tolist()
    low = torch.ones(2, device="cuda").to(torch.float8_e4m3fn)
    whole = torch.zeros(2 * size, device="cuda").to(torch.float8_e4m3fn)
    dist.all_gather_into_tensor(whole, low)
    seen["float8"] = whole.float().tolist()
    dist.group.WORLD.bound_device_id = torch.device("cuda", rank)
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    half = dist.split_group(split_ranks=[[0], [1]], pg_options=options)
    dist.all_reduce(x, group=half)
    seen["split"] = dist.get_world_size(half), dist.get_backend(half), x.tolist()
    seen["in place"] = in_place()
    return seen


def in_place():
    """Dimensions of one element may have any stride; and what NCCL writes is no operation of autograd's."""
    x = torch.ones(4, device="cuda").as_strided((1, 1, 1, 2), (2, 1, 2, 1))
    before = x._version
    dist.all_reduce(x)
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    return x.flatten().tolist(), x._version - before


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_what_gloo_does_not_have(on_ranks):
    for rank, seen in enumerate(on_ranks(beyond_gloo)):
        assert seen == {
            "name": "nccl",
            "uneven all_gather": [[1], [2, 2]],
            "uneven reduce_scatter": [3] * (rank + 1),
            "uneven all_to_all": [(rank + 1, [1]), (rank + 2, [2])],
            "to oneself": (rank + 1, 2 - rank),
            "coalesced": (True, 3, [3, 3, 3]),
            "factor": [9, 9],
            "bool": [True, False],
            "float8": [1, 1, 1, 1],
            "split": (1, "nccl", [9, 9]),
            "in place": ([4, 4], 0),
        }


def memory_formats(rank, size):
    seen = {}
    for shape, format in (((2, 3, 2, 4), torch.channels_last), ((1, 2, 3, 2, 2), torch.channels_last_3d)):
        image = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
        lying = (
            image.contiguous(memory_format=format).movedim(1, -1).reshape(shape)
        )  # its memory, read in the other format
        for late in (False, True):
            alike, unlike = (
                image.to("cuda", memory_format=format if there else torch.contiguous_format)
                for there in (True, rank == 1)
            )
            strides = alike.stride(), unlike.stride()
            for tensor in (alike, unlike):
                work = dist.all_reduce(tensor, async_op=late)
                if late:
                    work.wait()
                    assert work.result()[0].shape == image.shape
            assert (alike.stride(), unlike.stride()) == strides
            mixed = image + lying if rank == 0 else image + _read_back(image, format)
            received = image.to("cuda", memory_format=format if rank else torch.contiguous_format)
            dist.broadcast(received, 0)
            sent = _read_back(image, format) if rank else image
            seen[shape, late] = [
                torch.equal(alike.cpu(), 2 * image),
                torch.equal(unlike.cpu(), mixed),
                torch.equal(received.cpu(), sent),
                torch.equal(unlike.cpu(), 2 * image),
            ]
    return seen


def _read_back(image, format):
    """What a tensor of this format has when the memory of `image`, which is contiguous, was written to its own."""
    other = torch.empty(image.shape).contiguous(memory_format=format)
    other.movedim(1, -1).copy_(image.reshape(other.movedim(1, -1).shape))
    return other


def test_memory_is_moved_as_it_lies_whatever_the_format_of_others(on_ranks):
    """As by NCCL and gloo: ranks whose tensors have different memory formats add up elements that do not belong
    together."""
    for seen in on_ranks(memory_formats):
        assert all(found == [True, True, True, False] for found in seen.values()), seen


def late(rank, size):
    x, host = filled(rank), torch.ones(1)
    work = dist.all_reduce(x, async_op=True)
    unwaited = x.isnan().all().item()
    work.wait()
    y = filled(rank)
    dist.all_reduce(y, async_op=True)
    torch.cuda.synchronize()
    received = filled(rank)
    sent = dist.isend(filled(rank), (rank + 1) % size)
    receiving = dist.irecv(received, (rank - 1) % size)
    early = received.isnan().all().item()
    receiving.wait(), sent.wait()
    on_host = dist.all_reduce(host, async_op=True)
    host_early = host.isnan().all().item()
    on_host.wait()
    z = filled(rank)
    value = dist.all_reduce(z, async_op=True).get_future().then(lambda f: f.value()[0] * 2).wait()
    parts = [torch.empty_like(x) for _ in range(size)]
    gathered = dist.all_gather(parts, filled(rank), async_op=True).get_future().wait()[0]
    values = value.tolist(), gathered.tolist()
    return unwaited, x.tolist(), y.tolist(), early, received.tolist(), host_early, host.item(), *values


def test_results_are_poison_until_waited_for(on_ranks):
    for rank, seen in enumerate(on_ranks(late, backend="cpu:gloo,cuda:nccl")):
        assert seen == (True, [3, 3], [3, 3], True, [2 - rank] * 2, True, 2, [6, 6], [[1, 1], [2, 2]])


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_tensors_are_hashed_as_the_most_talkative_debug_level_logs_them():
    with simulated_node(1):
        numbers = torch.ones(3, device="cuda"), torch.ones(3, device="cuda", dtype=torch.bfloat16)
        one, other = (torch._C._distributed_c10d._hash_tensors([number]) for number in numbers)
        assert one == torch._C._distributed_c10d._hash_tensors([torch.ones(3)]) != other
