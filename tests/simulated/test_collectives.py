"""torch.distributed between simulated devices of several processes."""

from __future__ import annotations

import copy
import math
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from mgpu_check.simulated import groups, simulated_node


def filled(rank, *shape):
    return torch.full(shape or (2,), float(rank + 1), device="cuda")


def refusal(call):
    try:
        call()
    except (RuntimeError, ValueError) as error:
        return type(error).__name__, str(error)
    return None


def collectives(rank, size):
    seen = {"backend": dist.get_backend()}
    x = filled(rank)
    dist.all_reduce(x)
    seen["all_reduce"] = x.tolist()
    x = filled(rank).bfloat16()
    dist.all_reduce(x, op=dist.ReduceOp.AVG)
    seen["average"] = x.tolist()
    x = filled(rank)
    dist.broadcast(x, 1)
    seen["broadcast"] = x.tolist()
    x = filled(rank)
    dist.reduce(x, 1)
    seen["reduce"] = x.tolist()
    rows = [torch.zeros(2, device="cuda") for _ in range(size)]
    dist.all_gather(rows, filled(rank))
    seen["all_gather"] = [r.tolist() for r in rows]
    whole = torch.zeros(size, 2, device="cuda")
    getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(whole, filled(rank))
    seen["all_gather_into_tensor"] = whole.tolist()
    part = torch.zeros(2, device="cuda")
    dist.reduce_scatter(part, [filled(rank) + 10 * i for i in range(size)])
    seen["reduce_scatter"] = part.tolist()
    getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)(part, filled(rank, size, 2))
    seen["reduce_scatter_tensor"] = part.tolist()
    rows = [torch.zeros(1, device="cuda") for _ in range(size)]
    dist.all_to_all(rows, [filled(rank, 1) + 10 * i for i in range(size)])
    seen["all_to_all"] = [r.item() for r in rows]
    flat = torch.zeros(size, device="cuda")
    dist.all_to_all_single(flat, filled(rank, size))
    seen["all_to_all_single"] = flat.tolist()
    rows = [torch.zeros(2, device="cuda") for _ in range(size)] if rank == 0 else None
    dist.gather(filled(rank), rows)
    seen["gather"] = None if rows is None else [r.tolist() for r in rows]
    if hasattr(dist, "gather_single"):
        whole = torch.zeros(size, 2, device="cuda") if rank == 1 else None
        dist.gather_single(filled(rank), whole, dst=1)
        seen["gather_single"] = None if whole is None else whole.tolist()
    one = torch.zeros(1, device="cuda")
    dist.scatter(one, [filled(rank, 1) * i for i in range(size)] if rank == 0 else None, src=0)
    seen["scatter"] = one.item()
    operations = [
        dist.P2POp(dist.isend, filled(rank), (rank + 1) % size),
        dist.P2POp(dist.irecv, part, (rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    seen["neighbour"] = part.tolist()
    if rank == 0:
        dist.send(filled(rank) * 7, 1)
    else:
        dist.recv(part, 0)
        seen["recv"] = part.tolist()
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    seen["objects"] = [o["rank"] for o in objects]
    dist.barrier(device_ids=[rank])
    group = dist.new_group([0, 1], backend="gloo")
    host = torch.ones(1)
    dist.all_reduce(host, group=group)
    seen["gloo group"] = (dist.get_backend(group), host.item())
    return seen


def test_every_collective(on_ranks):
    for rank, seen in enumerate(on_ranks(collectives)):
        assert seen == {
            "backend": "nccl",
            "all_reduce": [3, 3],
            "average": [1.5, 1.5],
            "broadcast": [2, 2],
            "reduce": [3, 3] if rank == 1 else [1, 1],
            "all_gather": [[1, 1], [2, 2]],
            "all_gather_into_tensor": [[1, 1], [2, 2]],
            "reduce_scatter": [3 + 20 * rank] * 2,
            "reduce_scatter_tensor": [3, 3],
            "all_to_all": [1 + 10 * rank, 2 + 10 * rank],
            "all_to_all_single": [1, 2],
            "gather": [[1, 1], [2, 2]] if rank == 0 else None,
            "scatter": rank,
            "neighbour": [2 - rank] * 2,
            "objects": [0, 1],
            "gloo group": ("gloo", 2),
            **({"recv": [7, 7]} if rank == 1 else {}),
            **({"gather_single": [[1, 1], [2, 2]] if rank == 1 else None} if hasattr(dist, "gather_single") else {}),
        }


def beyond_gloo(rank, size):
    """What NCCL has and gloo has not."""
    seen = {"name": dist.group.WORLD._get_backend(torch.device("cuda")).name()}
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
    dist.all_reduce(x, op=dist._make_nccl_premul_sum(3.0))
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
    return seen


def in_place(rank, size):
    """Dimensions of one element may have any stride; and what NCCL writes is no operation of autograd's."""
    x = torch.ones(4, device="cuda").as_strided((1, 1, 1, 2), (2, 1, 2, 1))
    before = x._version
    dist.all_reduce(x)
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    return x.flatten().tolist(), x._version - before


def test_a_tensor_is_reduced_where_it_is(on_ranks):
    assert on_ranks(in_place) == [([4, 4], 0)] * 2


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


def one_device(rank, size):
    torch.cuda.set_device(0)
    return refusal(lambda: dist.all_reduce(torch.ones(1, device="cuda")))


def test_two_ranks_on_one_device_are_refused(on_ranks):
    for kind, words in on_ranks(one_device):
        assert kind == "DistBackendError"
        assert "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 0" in words


def placed_wrongly(rank, size):
    """Each on a group of its own: the first collective makes the communicator."""
    from torch.distributed import _functional_collectives as functional

    torch.cuda.set_device(0)
    one = torch.ones(1, device="cuda")
    ways = {
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
        assert len(seen) == 7
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
    made = groups.NcclGroup.made

    def late(group):
        nonlocal freed
        store.wait(["destroyed"])
        freed = refusal(lambda: store.wait(["freed"], timedelta(seconds=0.5))) is None
        made(group)

    if rank == 1:
        groups.NcclGroup.made = late
    unused = dist.new_group()
    groups.NcclGroup.made = made
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
    monkeypatch.setattr(groups, "_CHANGING_PLACES", timedelta(milliseconds=100))
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
    return unwaited, x.tolist(), y.tolist(), early, received.tolist(), host_early, host.item(), value.tolist()


def test_results_are_poison_until_waited_for(on_ranks):
    for rank, seen in enumerate(on_ranks(late, backend="cpu:gloo,cuda:nccl")):
        assert seen == (True, [3, 3], [3, 3], True, [2 - rank] * 2, True, 2, [6, 6])


def average_hook(state, bucket):
    buffer = bucket.buffer()
    assert buffer.is_cuda
    buffer.div_(dist.get_world_size())
    return dist.all_reduce(buffer, async_op=True).get_future().then(lambda f: f.value()[0])


WAYS = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
    "hook": {"hook": average_hook},
    "sync batch norm": {"sync": True},
    "accumulation": {"accumulate": True},
}


def trained(rank, size):
    errors = {}
    for name, way in WAYS.items():
        way = dict(way)
        hook, sync, accumulate = way.pop("hook", None), way.pop("sync", False), way.pop("accumulate", False)
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(6) if sync else nn.Identity()
        reference = nn.Sequential(nn.Linear(4, 6), norm, nn.ReLU(), nn.Linear(6, 3))
        net = copy.deepcopy(reference).to(rank)
        if sync:
            net = nn.SyncBatchNorm.convert_sync_batchnorm(net)
        ddp = DistributedDataParallel(net, device_ids=[rank], **way)
        if hook:
            ddp.register_comm_hook(None, hook)
        x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))
        mine = slice(rank * 8 // size, (rank + 1) * 8 // size)
        optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (reference, ddp)]
        for _ in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
            F.cross_entropy(reference(x), y).backward()
            if accumulate:
                with ddp.no_sync():
                    (F.cross_entropy(ddp(x[mine].cuda()), y[mine].cuda()) / 2).backward()
            (F.cross_entropy(ddp(x[mine].cuda()), y[mine].cuda()) / (2 if accumulate else 1)).backward()
            for p, q in zip(net.parameters(), reference.parameters(), strict=True):
                assert p.grad.get_device() == rank
                torch.testing.assert_close(p.grad.cpu(), q.grad, msg=lambda m, name=name: f"{name}: {m}")
            for optimizer in optimizers:
                optimizer.step()
        errors[name] = True
    return sorted(errors)


def test_distributed_data_parallel(on_ranks):
    assert on_ranks(trained) == [sorted(WAYS)] * 2


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


def test_a_hook_for_buffers(on_ranks):
    assert on_ranks(buffers_averaged) == [[3, 3]] * 2


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


def test_ranks_with_uneven_inputs_join(on_ranks):
    assert on_ranks(joined) == [[1, 1], [0.5, 1]]


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def trained_under_a_mode(rank, size):
    ddp = DistributedDataParallel(nn.Linear(1, 1, bias=False).to(rank), device_ids=[rank])
    with Passing():  # the reducer's plain buckets then come by way of Python
        ddp(torch.full((1, 1), float(rank + 1))).sum().backward()
    return ddp.module.weight.grad.item()


def test_distributed_data_parallel_under_a_mode(on_ranks):
    assert on_ranks(trained_under_a_mode) == [1.5, 1.5]


def restored(rank, size):
    ddp = DistributedDataParallel(nn.Linear(2, 2).to(rank), device_ids=[rank])
    F.mse_loss(ddp(torch.ones(1, 2)), torch.ones(1, 2).cuda()).backward()
    weight = ddp.module.weight
    saved = {name: torch.full_like(value, 5.0, device="cpu") for name, value in ddp.state_dict().items()}
    ddp.load_state_dict(saved)
    return ddp.module.weight is weight, weight.device.index, weight.tolist()


def test_a_wrapped_module_loads_a_checkpoint(on_ranks):
    for rank, seen in enumerate(on_ranks(restored)):
        assert seen == (True, rank, [[5, 5], [5, 5]])


def meshes(rank, size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cuda", (size,))
    sharded = distribute_tensor(torch.arange(8.0, device="cuda").reshape(4, 2), mesh, [Shard(0)])
    doubled = (sharded * 2).full_tensor()
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    net = copy.deepcopy(reference).to(rank)
    fully_shard(net, mesh=mesh)
    x = torch.randn(4, 4)
    net(x[rank * 2 : rank * 2 + 2].cuda()).square().mean().backward()
    reference(x).square().mean().backward()
    for p, q in zip(net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor().cpu(), q.grad)
    return sharded.to_local().tolist(), doubled.get_device(), doubled.cpu().sum().item()


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_tensors_are_hashed_as_the_most_talkative_debug_level_logs_them():
    with simulated_node(1):
        numbers = torch.ones(3, device="cuda"), torch.ones(3, device="cuda", dtype=torch.bfloat16)
        one, other = (torch._C._distributed_c10d._hash_tensors([number]) for number in numbers)
        assert one == torch._C._distributed_c10d._hash_tensors([torch.ones(3)]) != other


def test_device_mesh_tensor_parallel_and_fully_shard(on_ranks):
    first, second = on_ranks(meshes)
    assert first == ([[0, 1], [2, 3]], 0, 56)
    assert second == ([[4, 5], [6, 7]], 1, 56)
