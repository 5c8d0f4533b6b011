"""Adapt the C++ half of DistributedDataParallel, which sees tensors of the backing device and runs on gloo.

Because C++ cannot raise NCCL's errors for these tensors, the wrappers raise them before the call. C++ sends directly on
gloo. If the node has simulated hardware, its transfers go through the process group instead, which the hardware
observes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from mgpu_check.simulated import hardware
from mgpu_check.simulated.groups import NO_CPU, connect, nccl_of
from mgpu_check.simulated.late import LateFuture, LateWork
from mgpu_check.simulated.tensor import SimulatedTensor, tag
from mgpu_check.torch_hooks.patches import Patches, around

_c10d = torch._C._distributed_c10d


def _meet(group: dist.ProcessGroup, tensors: Sequence[torch.Tensor]) -> None:
    """Connect the device of `tensors`, which C++ sends together, to `group`, or raise NCCL's error for CPU tensors."""
    found = nccl_of(group)
    if found is None or not tensors:
        return
    first = tensors[0]
    if isinstance(first, SimulatedTensor):
        connect(found, first.get_device())
    elif "cpu" not in found.backends and first.device.type == "cpu":
        raise RuntimeError(NO_CPU)


@around
def _verify(
    original: Callable[..., None], process_group: dist.ProcessGroup, params: Sequence[torch.Tensor], logger: Any = None
) -> None:
    _meet(process_group, params)
    original(process_group, params, logger)


@around
def _broadcast_coalesced(
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
    """The hook that reduces the buckets of a reducer in Python; the user's hook may replace it."""

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
    """Pass gloo's own work to C++, which uses it to count the active ranks in DDP's ``join``."""
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
def _bucket_buffer(original: Callable[..., torch.Tensor], self: object) -> torch.Tensor:
    made = original(self)
    home = self.parameters()[0]  # type: ignore[attr-defined]
    return tag(made, home.device) if isinstance(home, SimulatedTensor) and type(made) is torch.Tensor else made


@around
def _bucket_gradients(original: Callable[..., list[torch.Tensor]], self: object) -> list[torch.Tensor]:
    home = self.parameters()[0]  # type: ignore[attr-defined]
    made = original(self)
    if not isinstance(home, SimulatedTensor):
        return made
    return [tag(g, home.device) if type(g) is torch.Tensor else g for g in made]


def install_reducer(patches: Patches) -> None:
    for name, wrap in (
        ("_verify_params_across_processes", _verify),
        ("_broadcast_coalesced", _broadcast_coalesced),
        ("_register_comm_hook", _comm_hook),
    ):
        patches.replace(getattr(_c10d, name), wrap(getattr(_c10d, name)))
    patches.replace(torch.futures.collect_all, _finishing(torch.futures.collect_all))
    patches.at_exit(_buckets.clear)
    reducer = _c10d.Reducer
    patches.wrap(reducer, "__init__", _made)
    patches.wrap(reducer, "_set_forward_pass_work_handle", _forward_work)
    patches.wrap(reducer, "_install_post_backward_futures", _finishing)
    bucket = _c10d.GradBucket
    patches.wrap(bucket, "buffer", _bucket_buffer)
    patches.wrap(bucket, "gradients", _bucket_gradients)
