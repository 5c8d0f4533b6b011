"""Replace the C++ half of ``nn.parallel`` (broadcast, scatter and gather between simulated devices), and adapt that
of DistributedDataParallel, which sees tensors of the backing device and runs on gloo.

The functions for ``nn.parallel`` replace those in ``torch._C``; ``torch.nn.parallel.comm`` above them stays
torch's own.

Because C++ cannot raise NCCL's errors for these tensors, the wrappers raise them before the call. C++ sends
directly on gloo. If the node has simulated hardware, its transfers go through the process group instead, which the
hardware observes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.parallel._functions

from mgpu_check.simulated import hardware
from mgpu_check.simulated.cuda.runtime import StreamContext
from mgpu_check.simulated.cuda.streams import Stream
from mgpu_check.simulated.distributed.collective_calls import LateFuture, LateWork
from mgpu_check.simulated.distributed.process_groups import NO_CPU, check_types, connect, nccl_of
from mgpu_check.simulated.node import simulated_device
from mgpu_check.simulated.tensor import SimulatedTensor, mapped, tag
from mgpu_check.simulated.transfer import LAZY, move, uninitialized_on
from mgpu_check.torch_hooks.patches import Patches, around

_c10d = torch._C._distributed_c10d


def _meet(group: dist.ProcessGroup, tensors: Sequence[torch.Tensor]) -> None:
    """Connect the device of `tensors`, which C++ sends together, to `group`, or raise NCCL's error for CPU tensors."""
    nccl_group = nccl_of(group)
    if nccl_group is None or not tensors:
        return
    tensor = tensors[0]
    if isinstance(tensor, SimulatedTensor):
        connect(nccl_group, tensor.get_device())
    elif "cpu" not in nccl_group.backends and tensor.device.type == "cpu":
        raise RuntimeError(NO_CPU)


@around
def _verify(
    original: Callable[..., None], process_group: dist.ProcessGroup, params: Sequence[torch.Tensor], logger: Any = None
) -> None:
    _meet(process_group, params)
    original(process_group, params, logger)


@around
def _broadcast_of_reducer(
    original: Callable[..., None],
    process_group: dist.ProcessGroup,
    tensors: list[torch.Tensor],
    buffer_size: int,
    src: int = 0,
) -> None:
    """Broadcast in one call per device: C++ joins tensors of one device, and sees only the backing device."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        by_device.setdefault(tensor.device, []).append(tensor)
    for together in by_device.values():
        _meet(process_group, together)
        if hardware.present is None or nccl_of(process_group) is None:
            original(process_group, together, buffer_size, src)
            continue
        options = _c10d.BroadcastOptions()
        options.rootRank = src
        for tensor in together:
            process_group.broadcast([tensor.detach()], options).wait()


class _Buckets:
    """The hook that reduces the buckets of a reducer in Python; the user's hook may replace it.

    It is made with a reducer on NCCL if the node has simulated hardware. C++ calls it for each bucket.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._given: tuple[object, Callable[..., Any]] | None = None

    def replace(self, state: object, hook: Callable[..., Any]) -> None:
        if self._given is not None:
            raise RuntimeError("register_comm_hook or register_builtin_comm_hook can only be called once.")
        self._given = state, hook

    def __call__(self, _: object, bucket: Any) -> Any:
        if self._given is not None:
            state, hook = self._given
            return hook(state, bucket)
        buffer = bucket.buffer()
        buffer.mul_(1 / self._group.size())
        work = self._group.allreduce([buffer], _c10d.AllreduceOptions())
        return work.get_future().then(lambda future: future.value()[0])


_buckets: dict[int, _Buckets] = {}  # by the id of the reducer, because it supports no weak references


@around
def _made(original: Callable[..., None], self: Any, params: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> None:
    group = kwargs.get("process_group", args[2] if len(args) > 2 else None)
    if group is not None:
        _meet(group, params)
    original(self, params, *args, **kwargs)
    _buckets.pop(id(self), None)
    if group is not None and hardware.present is not None and nccl_of(group) is not None:
        buckets = _Buckets(group)
        _c10d._register_comm_hook(self, None, buckets)
        _buckets[id(self)] = buckets


@around
def _forward_work(original: Callable[..., None], self: object, work: object, use_static_world_size: bool) -> None:
    """Pass gloo's own work to C++, which uses it to count the active ranks in DDP's ``join``.

    C++ keeps the work, and waits for it: torch/csrc/distributed/c10d/reducer.hpp, ForwardPassAllreduceWork, torch 2.13
    """
    original(self, work.works[0] if isinstance(work, LateWork) else work, use_static_world_size)


def _comm_hook(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def register(reducer: object, state: object, comm_hook: Callable[..., object]) -> None:
        @functools.wraps(comm_hook)
        def hook(state: object, bucket: object) -> object:
            future = comm_hook(state, bucket)
            if isinstance(future, LateFuture):
                future.finish()
            return future

        if id(reducer) in _buckets:
            _buckets[id(reducer)].replace(state, hook)
        else:
            original(reducer, state, hook)

    return register


@around
def _finishing(original: Callable[..., object], *args: Any) -> object:
    """Finish the futures in the last argument of a function before C++ waits for them."""
    for future in args[-1]:
        if isinstance(future, LateFuture):
            future.finish()
    return original(*args)


@around
def _of_bucket(original: Callable[..., Any], self: Any) -> Any:
    """Return the buffer or the gradients of a bucket, on the device of its parameters."""
    tensors, home = original(self), self.parameters()[0]
    if not isinstance(home, SimulatedTensor):
        return tensors
    return mapped(tensors, lambda t: tag(t, home.device) if type(t) is torch.Tensor else t)


def install_reducer(patches: Patches) -> None:
    for name, wrap in (
        ("_verify_params_across_processes", _verify),
        ("_broadcast_coalesced", _broadcast_of_reducer),
        ("_register_comm_hook", _comm_hook),
    ):
        patches.replace(getattr(_c10d, name), wrap(getattr(_c10d, name)))
    patches.replace(torch.futures.collect_all, _finishing(torch.futures.collect_all))
    patches.at_exit(_buckets.clear)
    reducer = _c10d.Reducer
    patches.wrap(reducer, "__init__", _made)
    patches.wrap(reducer, "_set_forward_pass_work_handle", _forward_work)
    patches.wrap(reducer, "_install_post_backward_futures", _finishing)
    for name in ("buffer", "gradients"):
        patches.wrap(_c10d.GradBucket, name, _of_bucket)


def _device(index: int) -> torch.device:
    if index < 0:
        raise RuntimeError(f"Expected non-negative device index, but got {index}")
    device = simulated_device(index)
    assert device is not None
    return device


def _check_outputs(out: Sequence[torch.Tensor]) -> None:
    for i, tensor in enumerate(out):
        if not isinstance(tensor, SimulatedTensor):
            raise RuntimeError(
                f"Expected all output tensors to be CUDA tensors, but output tensor at index {i} has device "
                f"'{tensor.device}'"
            )


def _broadcast(tensor: torch.Tensor, devices: Sequence[int]) -> list[torch.Tensor]:
    targets = [_device(d) for d in devices]
    if tensor.is_cuda and tensor.is_contiguous() and any(target != tensor.device for target in targets):
        check_types(tensor)  # NCCL broadcasts it to the other devices
    with torch.no_grad():
        return [move(tensor, target) for target in targets]


def _broadcast_out(tensor: torch.Tensor, out: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    _check_outputs(out)
    for i, target in enumerate(out):
        if target.shape != tensor.shape:
            raise RuntimeError(
                f"Expected all output tensors to have same shape as the source tensor {list(tensor.shape)}, but output "
                f"tensor at index {i} has shape {list(target.shape)}"
            )
    if _of_nccl([tensor, *out]):
        check_types(tensor)
    with torch.no_grad():
        return [target.copy_(tensor) for target in out]


def _of_nccl(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether torch calls NCCL: several contiguous tensors, each on its own device."""
    distinct = len({tensor.device for tensor in tensors}) == len(tensors) > 1
    return distinct and all(tensor.is_cuda and tensor.is_contiguous() for tensor in tensors)


def _broadcast_coalesced(
    tensors: Sequence[torch.Tensor], devices: Sequence[int], buffer_size: int
) -> list[list[torch.Tensor]]:
    targets = [_device(d) for d in devices]
    if any(tensor.device != targets[0] for tensor in tensors):
        raise RuntimeError(f"All tensors must be on devices[0]: {devices[0]}")
    if any(target != targets[0] for target in targets):
        check_types(*(tensor for tensor in tensors if not isinstance(tensor, LAZY)))
    with torch.no_grad():
        return [[_copy(t, target) for t in tensors] for target in targets]


def _copy(tensor: torch.Tensor, target: torch.device) -> torch.Tensor:
    """Copy a parameter; accept a lazy one, which ``replicate`` refuses later with torch's own message."""
    if isinstance(tensor, LAZY):
        return uninitialized_on(tensor, target, None)
    return move(tensor, target)


def _copies(
    shards: Sequence[torch.Tensor], devices: Sequence[torch.device], streams: Sequence[Stream | None] | None
) -> list[torch.Tensor]:
    """Copy each shard to its device on its stream; a shard that is on its device already stays a view."""
    copies = []
    for i, (shard, device) in enumerate(zip(shards, devices, strict=False)):
        stream = streams[i] if streams else None
        if stream is not None and stream.device != device:
            raise RuntimeError(
                f"Expected the device associated with the stream at index {i} (was {stream.device_index}) to match the "
                f"device supplied at that index (expected {device.index})"
            )
        with torch.no_grad(), StreamContext(stream):
            copies.append(move(shard, device, non_blocking=True))
    return copies


def _scatter(
    tensor: torch.Tensor,
    devices: Sequence[int],
    chunk_sizes: Sequence[int] | None,
    dim: int,
    streams: Sequence[Stream | None] | None,
) -> list[torch.Tensor]:
    if not devices:
        raise RuntimeError("Expected at least one device to scatter to")
    targets = [_device(d) for d in devices]
    if chunk_sizes is None:
        return _copies(tensor.chunk(len(targets), dim), targets, streams)
    if len(chunk_sizes) != len(targets):
        raise RuntimeError(
            f"Expected devices and chunk_sizes to be of same length, but got len(devices) = {len(targets)} and "
            f"len(chunk_sizes) = {len(chunk_sizes)}"
        )
    return _copies(tensor.split(list(chunk_sizes), dim), targets, streams)


def _scatter_out(
    tensor: torch.Tensor, out: Sequence[torch.Tensor], dim: int, streams: Sequence[Stream | None] | None
) -> list[torch.Tensor]:
    if not out:
        raise RuntimeError("Expected at least one output tensor to scatter to")
    _check_outputs(out)
    dim = dim + tensor.dim() if dim < 0 else dim
    shape = list(tensor.shape)
    for i, target in enumerate(out):
        actual = list(target.shape)
        if len(actual) != len(shape) or [*actual[:dim], shape[dim], *actual[dim + 1 :]] != shape:
            raise RuntimeError(
                f"Output tensor at index {i} has incorrect shape: {actual}. Expected same shape except for scatter dim "
                f"{dim} as the source tensor: {shape}"
            )
    sizes = [target.size(dim) for target in out]
    if sum(sizes) != shape[dim]:
        raise RuntimeError(
            f"Total size for output tensors along scatter dim {dim} does not match the source tensor size at dim "
            f"{dim}. Expected {shape[dim]}, but got total size {sum(sizes)}"
        )
    shards = _copies(tensor.split(sizes, dim), [target.device for target in out], streams)
    with torch.no_grad():
        return [target.copy_(shard) for target, shard in zip(out, shards, strict=True)]


def _gathered_shape(tensors: Sequence[torch.Tensor], dim: int) -> list[int]:
    """Return the shape of all ``tensors`` joined along ``dim``; raise RuntimeError if their shapes do not match."""
    if not tensors:
        raise RuntimeError("Expected at least one tensor to gather from")
    shape = list(tensors[0].shape)
    dim = dim + len(shape) if dim < 0 else dim
    total = 0
    for i, tensor in enumerate(tensors):
        if not isinstance(tensor, SimulatedTensor):
            raise RuntimeError(
                f"Expected all input tensors to be CUDA tensors, but tensor at index {i} has device '{tensor.device}'"
            )
        if tensor.dim() != len(shape):
            raise RuntimeError(
                f"Expected all input tensors to have the same number of dimensions, but tensor at index {i}has "
                f"{tensor.dim()} dimensions, (expected {len(shape)})"
            )
        shape[dim] = tensor.size(dim)
        if list(tensor.shape) != shape:
            raise RuntimeError(
                f"Input tensor at index {i} has invalid shape {list(tensor.shape)}, but expected {shape}"
            )
        total += tensor.size(dim)
    shape[dim] = total
    return shape


def _gather(tensors: Sequence[torch.Tensor], dim: int, destination: int | None) -> torch.Tensor:
    _gathered_shape(tensors, dim)
    home = simulated_device("cuda" if destination is None else destination) if destination != -1 else None
    with torch.no_grad():
        return torch.cat([move(t, home or torch.device("cpu")) for t in tensors], dim)


def _gather_out(tensors: Sequence[torch.Tensor], out: torch.Tensor, dim: int) -> torch.Tensor:
    shape = _gathered_shape(tensors, dim)
    if list(out.shape) != shape:
        raise RuntimeError(f"Expected out tensor to have shape {shape}, but got {list(out.shape)}")
    with torch.no_grad():
        return out.copy_(torch.cat([move(t, out.device) for t in tensors], dim))


def install_parallel(patches: Patches) -> None:
    for function in (_broadcast, _broadcast_out, _broadcast_coalesced, _scatter, _scatter_out, _gather, _gather_out):
        patches.set(torch._C, function.__name__, function)
    # Scatter caches one copy stream per device at its first call; that may have been outside this node.
    # torch/nn/parallel/_functions.py, _get_stream, torch 2.13
    patches.set(torch.nn.parallel._functions, "_streams", None)
