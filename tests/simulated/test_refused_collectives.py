"""What NCCL refuses, and ranks on the wrong devices."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mgpu_check.simulated.distributed import process_groups
from tests.simulated.conftest import refusal


def refusals(rank, size):
    gathered = None if rank else list(torch.ones(size, 1, device="cuda", dtype=torch.complex64))
    return {
        "host": refusal(lambda: dist.all_reduce(torch.ones(1))),
        "gaps": refusal(lambda: dist.all_reduce(torch.ones(4, 4, device="cuda")[:, :2])),
        "transposed": refusal(lambda: dist.broadcast(torch.ones(4, 2, device="cuda").t(), 0)),
        "band": refusal(
            lambda: dist.all_reduce(torch.ones(1, device="cuda", dtype=torch.int32), op=dist.ReduceOp.BAND)
        ),
        "short": refusal(lambda: dist.all_reduce(torch.ones(1, device="cuda", dtype=torch.int16))),
        "complex": refusal(lambda: dist.gather(torch.ones(1, device="cuda", dtype=torch.complex64), gathered, dst=0)),
    }


def test_what_nccl_refuses(on_ranks):
    for seen in on_ranks(refusals):
        assert seen == {
            "host": ("RuntimeError", "No backend type associated with device type cpu"),
            "gaps": ("ValueError", "Tensors must be contiguous"),
            "transposed": ("ValueError", "Tensors must be contiguous"),
            "band": ("ValueError", "Cannot use ReduceOp.BAND with NCCL"),
            "short": ("RuntimeError", "Input tensor data type is not supported for NCCL process group: Short"),
            "complex": ("RuntimeError", "Input tensor data type is not supported for NCCL process group: ComplexFloat"),
        }


def placed_wrongly(rank, size):
    """Each on a group of its own: the first collective makes the communicator."""
    from torch.distributed import _functional_collectives as functional

    torch.cuda.set_device(0)
    one = torch.ones(1, device="cuda")
    ways = {
        "all_reduce": lambda group: dist.all_reduce(one, group=group),
        "ddp": lambda group: DistributedDataParallel(nn.Linear(2, 2).cuda(), process_group=group),
        "ddp without init_sync": lambda group: DistributedDataParallel(
            nn.Linear(2, 2).cuda(), process_group=group, init_sync=False
        ),
        "objects": lambda group: dist.all_gather_object([None] * size, rank, group=group),
        "barrier": lambda group: dist.barrier(group, device_ids=[0]),
        "functional": lambda group: functional.all_reduce(one, "sum", group).wait(),
        "coalesced": lambda group: group.allreduce_coalesced([one]).wait(),
        "method": lambda group: group.allreduce([one]).wait(),
    }
    return {name: refusal(lambda way=way: way(dist.new_group())) for name, way in ways.items()}


def test_whatever_comes_first_refuses_two_ranks_on_one_device(on_ranks):
    for seen in on_ranks(placed_wrongly):
        assert len(seen) == 8
        for name, found in seen.items():
            assert found is not None, name
            assert found[0] == "DistBackendError", name
            assert "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 0" in found[1], name


def destroyed_unused(rank, size):
    """Destroy a group that no collective has used while rank 1 is still making it; see whether rank 0 has freed it
    there."""
    store = dist.distributed_c10d._get_default_store()
    before = dist.new_group()
    freed = None
    made = process_groups.NcclGroup.made

    def late(group):
        nonlocal freed
        store.wait(["destroyed"])
        freed = refusal(lambda: store.wait(["freed"], timedelta(seconds=0.5))) is None
        made(group)

    if rank == 1:
        process_groups.NcclGroup.made = late  # type: ignore[method-assign]
    unused = dist.new_group()
    process_groups.NcclGroup.made = made  # type: ignore[method-assign]
    dist.destroy_process_group(unused)
    if rank == 0:
        store.set("destroyed", "")
    dist.destroy_process_group(before)  # frees the one that was destroyed before it
    if rank == 0:
        store.set("freed", "")
    return freed


def test_a_group_is_freed_once_all_ranks_have_made_it(on_ranks):
    assert on_ranks(destroyed_unused) == [None, False]


def moved(rank, size):
    def reduced(index):
        dist.all_reduce(x := torch.ones(1, device=f"cuda:{index}"))
        return x.item()

    refused = refusal(lambda: reduced(0))
    placed, changed = reduced(rank), reduced(size - 1 - rank)
    return refused is not None, placed, changed


def test_ranks_that_move_to_other_devices(on_ranks):
    for rank, (refused, placed, changed) in enumerate(on_ranks(moved)):
        assert (refused, placed, changed) == (True, 2, 2), rank


def strayed(rank, size):
    dist.all_reduce(torch.ones(1, device="cuda"))
    return refusal(lambda: dist.all_reduce(torch.ones(1, device="cuda:0"))) if rank == 1 else None


def test_a_rank_that_strays_to_the_device_of_another_does_not_wait_for_it(on_ranks, monkeypatch):
    monkeypatch.setattr(process_groups, "_CHANGING_PLACES", timedelta(milliseconds=100))
    kind, words = on_ranks(strayed)[1]
    assert kind == "DistBackendError" and "rank 1 and rank 0 both on CUDA device 0" in words


def placed_on_the_host(rank, size):
    from torch.distributed import _functional_collectives as functional

    one = torch.ones(1)
    return {
        "ddp": refusal(lambda: DistributedDataParallel(nn.Linear(2, 2))),
        "ddp without init_sync": refusal(lambda: DistributedDataParallel(nn.Linear(2, 2), init_sync=False)),
        "functional": refusal(lambda: functional.all_reduce(one, "sum", dist.group.WORLD)),
        "method": refusal(lambda: dist.group.WORLD.allreduce([one])),
        "late": refusal(lambda: dist.all_reduce(one, async_op=True)),
        "backend": refusal(lambda: dist.group.WORLD._get_backend(torch.device("cpu"))),
    }


@pytest.mark.parametrize("backend", ["nccl", None])
def test_nccl_has_nothing_for_the_host(on_ranks, backend):
    refused = ("RuntimeError", "No backend type associated with device type cpu")
    for seen in on_ranks(placed_on_the_host, backend=backend):
        assert len(seen) == 6 and set(seen.values()) == {refused}, seen
