"""The collectives of ``torch.distributed`` on simulated tensors, with NCCL's refusals and its lateness.

gloo computes on the memory of the tensors. With ``async_op=True`` it computes on copies instead, and the results are
poison until ``wait()``, so that a missing wait shows every time.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from mgpu_check.node.simulated.groups import check_distinct_devices, install_groups, nccl_alone
from mgpu_check.node.simulated.patches import Patches
from mgpu_check.node.simulated.state import active_node
from mgpu_check.node.simulated.streams import Late, hold_outstanding, poison
from mgpu_check.node.simulated.tensor import SimulatedTensor, raw, tag

__all__ = ["LateWork", "install_collectives", "watch"]

# What NCCL has no type for, by the names that it prints.
_NO_NCCL_TYPE = {torch.int16: "Short"}
_NO_NCCL_OP = ("BAND", "BOR", "BXOR")


@dataclass(frozen=True)
class _Form:
    """Which parameters of a collective are written, read, or both."""

    out: str = ""
    inp: str = ""
    both: str = ""
    flat: bool = False  # NCCL takes the tensors as memory, whatever their shapes
    peer: bool = False  # point to point
    root: str = ""  # the rank that alone reads ("src") or alone receives ("dst") what `both` names


_FORMS = {
    "all_reduce": _Form(both="tensor"),
    "all_reduce_coalesced": _Form(both="tensors"),
    "broadcast": _Form(both="tensor", root="src"),
    "reduce": _Form(both="tensor", root="dst"),
    "all_gather": _Form(out="tensor_list", inp="tensor"),
    "all_gather_coalesced": _Form(out="output_tensor_lists", inp="input_tensor_list"),
    "all_gather_into_tensor": _Form(out="output_tensor", inp="input_tensor", flat=True),
    "all_gather_single": _Form(out="output_tensor", inp="input_tensor", flat=True),
    "_all_gather_base": _Form(out="output_tensor", inp="input_tensor", flat=True),
    "reduce_scatter": _Form(out="output", inp="input_list"),
    "reduce_scatter_tensor": _Form(out="output", inp="input", flat=True),
    "reduce_scatter_single": _Form(out="output", inp="input", flat=True),
    "_reduce_scatter_base": _Form(out="output", inp="input", flat=True),
    "all_to_all": _Form(out="output_tensor_list", inp="input_tensor_list"),
    "all_to_all_single": _Form(out="output", inp="input"),
    "gather": _Form(out="gather_list", inp="tensor"),
    "scatter": _Form(out="tensor", inp="scatter_list"),
    "send": _Form(inp="tensor", peer=True),
    "isend": _Form(inp="tensor", peer=True),
    "recv": _Form(out="tensor", peer=True),
    "irecv": _Form(out="tensor", peer=True),
}
_OF_OBJECTS = [
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
    "monitored_barrier",
]


class _Inside(threading.local):
    depth: int = 0


_inside = _Inside()


@contextmanager
def _on_its_own() -> Iterator[None]:
    """torch.distributed calls its own collectives inside, on CPU tensors of its making: neither checked nor late."""
    _inside.depth += 1
    try:
        yield
    finally:
        _inside.depth -= 1


@dataclass
class _Staging:
    """The plain tensors that gloo works on, and what of them goes back where."""

    late: bool
    deliveries: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    device: torch.device | None = None
    results: list[torch.Tensor] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, value: object, *, read: bool, written: bool, flat: bool) -> object:
        if isinstance(value, (list, tuple)):
            return [self.take(item, read=read, written=written, flat=flat) for item in value]
        if not isinstance(value, torch.Tensor):
            return value
        if isinstance(value, SimulatedTensor):
            self.device = value.device
        elif not self.late:
            return value.view(-1) if flat and value.is_contiguous() else value
        bare = raw(value).detach()
        if written:
            self.results.append(value)
        direct = not self.late and bare.device.type == "cpu" and bare.is_contiguous()
        if direct:
            host = bare
        elif read:
            host = bare.to("cpu", copy=True, memory_format=torch.contiguous_format)
        else:
            host = torch.empty(bare.shape, dtype=bare.dtype, device="cpu")
        if written and not direct:
            self.deliveries.append((bare, host))
            if self.late:
                poison(bare)
        return host.view(-1) if flat else host

    def finish(self, _: object) -> list[torch.Tensor]:
        self.deliver()
        return self.results

    def deliver(self) -> None:
        with self.lock, torch.no_grad():
            deliveries, self.deliveries = self.deliveries, []
            for target, host in deliveries:
                target.copy_(host.view(target.shape))


class LateWork(dist.Work):
    """The work of a collective whose results are poison until someone waits."""

    def __init__(self, work: dist.Work, staging: _Staging) -> None:
        super().__init__()
        self._work = work
        self._staging = staging
        self._late = Late(self._finish)
        if staging.device is not None:
            hold_outstanding(self._late, staging.device)

    def _finish(self) -> None:
        self._work.wait()
        self._staging.deliver()

    def wait(self, timeout: object = None) -> bool:
        if timeout is not None:
            self._work.wait(timeout)  # type: ignore[arg-type]
        self._late.deliver()
        return True

    def synchronize(self) -> None:
        self._late.deliver()

    def block_current_stream(self) -> None:
        self._late.deliver()

    def is_completed(self) -> bool:
        done = self._work.is_completed()
        if done:
            self._late.deliver()
        return done

    def is_success(self) -> bool:
        return self._work.is_success()

    def exception(self) -> object:
        return self._work.exception()

    def _source_rank(self) -> int:
        return self._work._source_rank()

    def result(self) -> list[torch.Tensor]:
        self._late.deliver()
        return self._staging.results

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        def finish(_: object) -> list[torch.Tensor]:
            self._staging.deliver()  # called as the work ends, by the thread that ends it: it cannot wait for itself
            return self._staging.results

        return self._work.get_future().then(finish)


def _leaves(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)


def _refuse(form: _Form, arguments: dict[str, object], group: dist.ProcessGroup | None) -> None:
    """What ProcessGroupNCCL checks (check_gpu_single_tensor and its kin), in its words."""
    first = True
    for name in (form.both, form.inp, form.out):
        value = arguments.get(name)
        for tensor in _leaves(value):
            if not isinstance(tensor, SimulatedTensor):
                if nccl_alone(group):
                    raise RuntimeError("No backend type associated with device type cpu")
                return
            if tensor.is_sparse:
                raise ValueError("Tensors must be CUDA and dense")
            if tensor.dtype in _NO_NCCL_TYPE:
                raise RuntimeError(
                    f"Input tensor data type is not supported for NCCL process group: {_NO_NCCL_TYPE[tensor.dtype]}"
                )
            if not form.peer:
                listed = isinstance(value, (list, tuple))
                if listed and not torch.ops.aten.is_non_overlapping_and_dense(tensor):
                    raise ValueError("Tensors must be non-overlapping and dense")
                if not listed and not _contiguous(tensor):
                    raise ValueError("Tensors must be contiguous")
            if first and not form.peer:
                check_distinct_devices(group, tensor)
                first = False
    op = arguments.get("op")
    for name in _NO_NCCL_OP if op is not None else ():
        if op == getattr(dist.ReduceOp, name):
            raise ValueError(f"Cannot use ReduceOp.{name} with NCCL")


def _contiguous(t: torch.Tensor) -> bool:
    if t.is_contiguous():
        return True
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return t.dim() in formats and t.is_contiguous(memory_format=formats[t.dim()])


def _at_root(form: _Form, arguments: dict[str, object], group: dist.ProcessGroup | None) -> bool:
    root = arguments.get(form.root)
    if root is None:
        return arguments.get(f"group_{form.root}", 0) == dist.get_rank(group)
    return root == dist.get_rank()


def _collective(original: Callable[..., object], form: _Form) -> Callable[..., object]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def collective(*args: object, **kwargs: object) -> object:
        if active_node() is None or _inside.depth:
            return original(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        arguments = bound.arguments
        group = arguments.get("group")
        if group is dist.GroupMember.NON_GROUP_MEMBER or not dist.is_initialized():
            return original(*args, **kwargs)
        tensors = [t for name in (form.out, form.inp, form.both) for t in _leaves(arguments.get(name))]
        if any(isinstance(t, SimulatedTensor) for t in tensors) or nccl_alone(group):
            _refuse(form, arguments, group)
        late = bool(arguments.get("async_op")) or original.__name__ in ("isend", "irecv")
        staging = _Staging(late)
        flat = form.flat and any(isinstance(t, SimulatedTensor) for t in tensors)
        read, written = True, True
        if form.root == "src":
            written = not _at_root(form, arguments, group)
        elif form.root == "dst" and not _at_root(form, arguments, group):
            # gloo uses the tensors of the others as scratch memory; NCCL leaves them as they are
            written = False
        for name, reads, writes in ((form.inp, True, False), (form.out, False, True), (form.both, read, written)):
            if name and arguments.get(name) is not None:
                value = arguments[name]
                if name == form.both and form.root == "dst" and not written and isinstance(value, SimulatedTensor):
                    value = value.detach().clone()
                arguments[name] = staging.take(value, read=reads, written=writes, flat=flat)
        with _on_its_own():
            result = original(*bound.args, **bound.kwargs)
        if late and result is not None:
            if isinstance(result, torch.futures.Future):  # the coalesced ones answer with one
                return result.then(staging.finish)
            return LateWork(result, staging)  # type: ignore[arg-type]
        staging.deliver()
        return result

    return collective


def _barrier(original: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(original)
    def barrier(group: object = None, async_op: bool = False, device_ids: object = None) -> object:
        return original(group, async_op) if active_node() is not None else original(group, async_op, device_ids)

    return barrier


def _of_objects(original: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(original)
    def collective(*args: object, **kwargs: object) -> object:
        with _on_its_own():
            return original(*args, **kwargs)

    return collective


def _bucket_buffer(original: Callable[..., torch.Tensor]) -> Callable[[object], torch.Tensor]:
    def buffer(self: object) -> torch.Tensor:
        made = original(self)
        home = self.parameters()[0]  # type: ignore[attr-defined]
        return tag(made, home.device) if isinstance(home, SimulatedTensor) and type(made) is torch.Tensor else made

    return buffer


def _bucket_gradients(original: Callable[..., list[torch.Tensor]]) -> Callable[[object], list[torch.Tensor]]:
    def gradients(self: object) -> list[torch.Tensor]:
        home = self.parameters()[0]  # type: ignore[attr-defined]
        made = original(self)
        if not isinstance(home, SimulatedTensor):
            return made
        return [tag(g, home.device) if type(g) is torch.Tensor else g for g in made]

    return gradients


def _broadcast_coalesced(original: Callable[..., None]) -> Callable[..., None]:
    """One call per device: C++, which joins tensors of one device before it sends them, sees the backing device only."""

    def broadcast(group: object, tensors: list[torch.Tensor], buffer_size: int, src: int = 0) -> None:
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for tensor in tensors:
            by_device.setdefault(tensor.device, []).append(tensor)
        for together in by_device.values():
            original(group, together, buffer_size, src)

    return broadcast


Around = Callable[[Callable[..., object]], Callable[..., object]]

_around: list[Around] = []


def watch(around: Around) -> None:
    """Have `around` put around each collective of the simulation, to see calls before they begin."""
    _around.append(around)


def _watched(collective: Callable[..., object]) -> Callable[..., object]:
    return functools.reduce(lambda inner, around: around(inner), _around, collective)


def install_collectives(patches: Patches) -> None:
    """Replace the collectives of ``torch.distributed`` and let process groups with NCCL be made."""
    install_groups(patches)
    for name, form in _FORMS.items():
        original = getattr(c10d, name, None)
        if original is not None:
            patches.replace(original, _watched(_collective(original, form)))
    for name in _OF_OBJECTS:
        patches.replace(getattr(c10d, name), _watched(_of_objects(getattr(c10d, name))))
    patches.replace(c10d.barrier, _watched(_barrier(c10d.barrier)))
    patches.replace(
        torch._C._distributed_c10d._broadcast_coalesced,
        _broadcast_coalesced(torch._C._distributed_c10d._broadcast_coalesced),
    )
    bucket = torch._C._distributed_c10d.GradBucket
    patches.set(bucket, "buffer", _bucket_buffer(bucket.buffer))
    patches.set(bucket, "gradients", _bucket_gradients(bucket.gradients))
