"""Move tensors between devices: copies under autograd, whose gradient returns to the source device; ``t.data = u``
and ``Module.to``, which keep the object; and lazy parameters, which store the device for their later values.

On a real node the object of ``t.data = u`` and its autograd state stay. Here a device tensor has another class and
another implementation, so this module exchanges them beneath the object and transfers the autograd state.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from mgpu_check.simulated import hardware
from mgpu_check.simulated.cuda.allocator import pin
from mgpu_check.simulated.cuda.graphs import recorder_of
from mgpu_check.simulated.cuda.streams import deliver_queued, host_waits, late_host_copy
from mgpu_check.simulated.node import BLOCK, Block, active_node, simulated_device
from mgpu_check.simulated.tensor import CLASS, SimulatedTensor, raw, tag
from mgpu_check.torch_hooks.patches import Patches

TARGET = "_mgpu_check_target"
# `UninitializedTensorMixin`, the base of both kinds; torch/nn/parameter.pyi of torch 2.13 does not declare it.
LAZY: type = UninitializedParameter.__mro__[1]


def uninitialized_on(t: torch.Tensor, target: torch.device, dtype: object) -> torch.Tensor:
    """Return a lazy tensor like ``t`` whose values will be created on ``target``; ``dtype`` None keeps its dtype."""
    make: Callable[..., torch.Tensor] = type(t)
    uninitialized = make(requires_grad=t.requires_grad, dtype=dtype or t.dtype)
    uninitialized.__dict__[TARGET] = target
    return uninitialized


def _new(original: Callable[..., torch.Tensor]) -> staticmethod[..., torch.Tensor]:
    def new(cls: type, *args: object, **kwargs: object) -> torch.Tensor:
        target = simulated_device(kwargs.get("device"))
        if target is None:
            return original(cls, *args, **kwargs)
        tensor = original(cls, *args, **{**kwargs, "device": "cpu"})
        tensor.__dict__[TARGET] = target
        return tensor

    return staticmethod(new)


def _parameter(original: Callable[..., torch.Tensor]) -> staticmethod[..., torch.Tensor]:
    def new(cls: type, data: object = None, requires_grad: bool = True) -> torch.Tensor:
        if isinstance(data, UninitializedParameter):  # Module.to makes a Parameter of what it moved
            return data
        return original(cls, data, requires_grad)

    return staticmethod(new)


def _materialize(original: Callable[..., None]) -> Callable[..., None]:
    def materialize(self: torch.Tensor, shape: object, device: object = None, dtype: object = None) -> None:
        node = active_node()
        remembered = self.__dict__.pop(TARGET, None)
        target = simulated_device(device) if device is not None else remembered
        if target is None or node is None:
            original(self, shape, device, dtype)
            return
        original(self, shape, node.backing, dtype)
        become(self, self.data.to(target))

    return materialize


def _device(self: torch.Tensor) -> torch.device:
    target: torch.device | None = self.__dict__.get(TARGET)
    return torch._C.TensorBase.device.__get__(self) if target is None else target


def install_lazy(patches: Patches) -> None:
    for lazy_class in (UninitializedParameter, UninitializedBuffer):
        patches.set(lazy_class, "__new__", _new(lazy_class.__new__))
    patches.set(torch.nn.Parameter, "__new__", _parameter(torch.nn.Parameter.__new__))
    patches.set(LAZY, "device", property(_device))
    patches.set(LAZY, "is_cuda", property(lambda self: self.device.type == "cuda"))
    patches.set(LAZY, "is_cpu", property(lambda self: self.device.type == "cpu"))
    patches.set(LAZY, "get_device", lambda self: -1 if self.device.index is None else self.device.index)
    patches.set(LAZY, "materialize", _materialize(vars(LAZY)["materialize"]))


_base: Any = torch._C.TensorBase
_plain: type = torch.Tensor
_ELSEWHERE = "_mgpu_check_elsewhere"  # marks a gradient that stayed on its device when its tensor moved
_OWN = ("_dev", "_is_param", TARGET, CLASS, _ELSEWHERE)
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def compatible(original: Callable[..., bool]) -> Callable[..., bool]:
    """Allow ``t.data = u`` between tensors of the host and of devices, as on a real node."""

    def has_compatible(input: torch.Tensor, from_: torch.Tensor) -> bool:  # dynamo compares these names
        return original(raw(input), raw(from_))

    return has_compatible


def become(t: torch.Tensor, value: torch.Tensor) -> None:
    """Replace the data of ``t`` by ``value``, where one is on the host and one on a device."""
    if not t.is_leaf:
        raise RuntimeError(
            f"t.data = u is not available on a simulated node where t, on {t.device}, is the result of an operation "
            f"and u is on {value.device}; assign to t.detach(), or use t.to()"
        )
    grad = _base.grad.__get__(t)
    hooks = {name: hook for name in _HOOKS if (hook := getattr(t, name)) is not None}
    if t.requires_grad and t._use_count() > 1:  # type: ignore[attr-defined]  # a graph may hold it
        torch.autograd.graph.get_gradient_edge(t).node.register_prehook(_refusal(t.device, value.device))
    new = _twin(t, value)
    _exchange(t, new)
    for name, hook in hooks.items():
        setattr(t, name, hook)  # even if Python still has them: C++ holds its own, which were exchanged
    if grad is not None:
        grad.__dict__[_ELSEWHERE] = True
        put_grad(t, grad)


def is_elsewhere(grad: torch.Tensor) -> bool:
    """Return whether this gradient stayed on its device when its tensor moved."""
    return _ELSEWHERE in grad.__dict__


def put_grad(t: torch.Tensor, grad: torch.Tensor) -> None:
    """Make ``grad`` the gradient of ``t``, even if their dtypes or shapes differ."""
    put = _base.grad.__set__
    if (grad.dtype, grad.shape, grad.layout) == (t.dtype, t.shape, t.layout):
        put(t, grad)
        return
    with torch._C._DisableTorchDispatch():
        kept, bare = _base.data.__get__(t), raw(grad)
        is_dense = bare.layout is torch.strided
        _base.data.__set__(t, bare if is_dense else bare.new_empty(bare.shape, layout=torch.strided))
        try:
            put(t, grad)
        finally:
            _base.data.__set__(t, kept)


def _refusal(source: torch.device, target: torch.device) -> Callable[..., NoReturn]:
    def refuse(*_: object) -> NoReturn:
        raise RuntimeError(
            f"a parameter was moved from {source} to {target} after the forward pass and before this backward pass, "
            f"whose gradient is on {source}; move it before the forward pass, or after the backward pass"
        )

    return refuse


def _twin(t: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return another tensor over the memory of ``value``, with the attributes of ``t`` and the class for that side."""
    new = value.detach()
    if value.layout is torch.strided and new.untyped_storage()._cdata != value.untyped_storage()._cdata:
        with torch.no_grad():
            new = value.view_as(value)
    tensor_class = t.__dict__.get(CLASS, type(t))
    if isinstance(t, torch.nn.Parameter):
        if not isinstance(new, SimulatedTensor) and issubclass(tensor_class, torch.nn.Parameter):
            new = torch.Tensor._make_subclass(tensor_class, new, t.requires_grad)
        else:
            new = torch.nn.Parameter(new, requires_grad=t.requires_grad)
    else:
        new.requires_grad_(t.requires_grad)
    new.__dict__.update({key: kept for key, kept in t.__dict__.items() if key not in _OWN})
    if isinstance(new, SimulatedTensor) and tensor_class not in (_plain, torch.nn.Parameter, SimulatedTensor):
        new.__dict__[CLASS] = tensor_class
    return new


def _exchange(target: Any, source: Any) -> None:
    """Exchange the contents of two tensor objects, as ``torch.utils.swap_tensors`` does, even if a graph holds one.

    torch's own function refuses tensors with weak references, or with references from C++ other than AccumulateGrad's:
    torch/utils/__init__.py, swap_tensors, torch 2.13 (pytorch/pytorch#127313).
    """
    attributes = ["__class__", "__dict__", *copyreg._slotnames(type(target))]  # type: ignore[attr-defined]
    for name in attributes:
        if hasattr(target, name) and hasattr(source, name):
            kept = getattr(target, name)
            setattr(target, name, getattr(source, name))
            setattr(source, name, kept)
    torch._C._swap_tensor_impl(target, source)


@dataclass(frozen=True)
class _Destination:
    """Where a copy goes, and how: as the arguments of `move`."""

    device: torch.device
    dtype: torch.dtype | None
    non_blocking: bool
    memory_format: torch.memory_format
    into: torch.Tensor | None


_to = torch._C.TensorBase.to


def _transfer(t: torch.Tensor, to: _Destination) -> torch.Tensor:
    node = active_node()
    source, device = t.device, to.device
    below = hardware.present
    if below is not None:
        for end in (source, device):
            below.touch(end)
        below.read(source, [t])
    if device.type == "cuda" and node is not None:
        if to.into is None:
            node.memory[device.index].require(t.numel() * (to.dtype or t.dtype).itemsize)
        if source.type == "cpu":
            deliver_queued(t, device)
            if not to.non_blocking:
                host_waits(device)

    def copied(operands: tuple[torch.Tensor], _: object = None) -> torch.Tensor:
        return _copied(operands[0], to)

    recorder = recorder_of(device if device.type == "cuda" else source)
    if recorder is None:
        out = copied((t,))
    elif device.type == "cuda":
        out = recorder.record(copied, (t,), {}, [], device)
    else:
        out = recorder.record(copied, (t,), {}, [], source, after=lambda host: late_host_copy(host, source, True))
    if node is not None and device.type == "cpu" and isinstance(t, SimulatedTensor):
        if to.non_blocking and to.into is None and out.layout is torch.strided:
            pin(out)  # torch also uses pinned memory for a non-blocking copy
        if recorder is None or not to.non_blocking:
            late_host_copy(out, source, to.non_blocking)
    return out


def _copied(t: torch.Tensor, to: _Destination) -> torch.Tensor:
    node, device, into = active_node(), to.device, to.into
    home = device if device.type != "cuda" or node is None else node.backing
    with torch._C._DisableTorchDispatch(), torch.no_grad():
        out = _to(raw(t), device=home, dtype=to.dtype or t.dtype, copy=True, memory_format=to.memory_format)
        if hardware.present is not None:
            host = t if t.device.type == "cpu" else into
            pinned = to.non_blocking if host is None else host.is_pinned()  # as new host memory is
            hardware.present.copied(t, device, out, into, pinned)
    if device.type == "cuda" and node is not None:
        if into is not None and out.layout is torch.strided:  # a device writes the copy straight into `into`
            out.untyped_storage().__dict__[BLOCK] = Block(device, node.memory[device.index], 0)
        return tag(out, device)
    return out


def captured_to_host(host: torch.Tensor, t: torch.Tensor) -> bool:
    """Record an asynchronous copy to pinned memory; return False if no graph is being captured."""
    source = t.device
    recorder = recorder_of(source)
    if recorder is None:
        return False

    def copy(operands: tuple[torch.Tensor, torch.Tensor], _: object = None) -> torch.Tensor:
        return operands[0].copy_(_copied(operands[1], to_host))

    to_host = _Destination(host.device, None, True, torch.preserve_format, None)
    operands = host, t.detach()
    recorder.record(copy, operands, {}, [host], source, after=lambda _: late_host_copy(host, source, True))
    return True


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: torch.Tensor, to: _Destination) -> torch.Tensor:
        ctx.source, ctx.dtype = t.device, t.dtype
        return _transfer(t, to)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return move(grad, ctx.source, ctx.dtype), None


def move(
    t: torch.Tensor,
    device: torch.device,
    dtype: torch.dtype | None = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format = torch.preserve_format,
    *,
    into: torch.Tensor | None = None,
) -> torch.Tensor:
    """Copy ``t`` to ``device`` (a simulated device with its index, or a real one), as ``Tensor.to`` does.

    Twice differentiable. The result has new memory, even if only the dtype changes; it is ``t`` itself if nothing
    changes. ``into`` is the tensor on ``device`` that receives the result from the caller, or None.
    """
    if t.device == device and (dtype is None or dtype == t.dtype):
        return t
    to = _Destination(device, dtype, non_blocking, memory_format, into)
    if torch.is_grad_enabled() and t.requires_grad:
        return _Move.apply(t, to)
    return _transfer(t, to)
