"""Replace the methods of tensors, modules and optimizers that name a device or depend on one, also for tensors that
wrap a device tensor: DTensor, and pending results of functional collectives.

C++ stores a device for a wrapper, and autograd asks the driver of this device for a stream. So wrappers are
created on the backing device, where the wrapped tensor is too. In Python they report the device of the wrapped
tensor.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed import device_mesh

from mgpu_check.simulated import hardware
from mgpu_check.simulated.cuda.allocator import is_pinned, pin
from mgpu_check.simulated.cuda.streams import late_host_copy
from mgpu_check.simulated.node import active_node, simulated_device, untraced_device
from mgpu_check.simulated.tensor import SUBCLASSES, SimulatedTensor, raw, tag, type_name
from mgpu_check.simulated.transfer import (
    LAZY,
    TARGET,
    become,
    captured_to_host,
    compatible,
    install_lazy,
    is_elsewhere,
    move,
    put_grad,
    uninitialized_on,
)
from mgpu_check.torch_hooks.patches import Patches, around
from mgpu_check.torch_hooks.tensors import DTENSOR, is_distributed, is_pending

_FAKE = "_rebuild_tensor_from_dtensor_meta"


def convert_local(t: torch.Tensor, convert: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Apply ``convert`` to the local tensor of DTensor ``t``, and return the DTensor with the result.

    ``convert`` must keep shape and strides. The result is differentiable if ``convert`` is.
    """
    distributed: Any = t
    local = convert(distributed.to_local())
    return type(distributed).from_local(
        local,
        distributed.device_mesh,
        distributed.placements,
        run_check=False,
        shape=distributed.shape,
        stride=distributed.stride(),
    )


def is_wrapper(t: torch.Tensor) -> bool:
    """Return whether ``t`` wraps other tensors, and has no memory of its own."""
    return hasattr(type(t), "__tensor_flatten__")


class _Moved(torch.autograd.Function):
    """Move the tensors that a wrapper wraps. C++ has the wrapper on the backing device, and would move nothing."""

    @staticmethod
    def forward(ctx: Any, t: Any, device: torch.device, non_blocking: bool) -> Any:
        ctx.device = t.device
        if is_pending(t):
            return t.trigger_wait().to(device, non_blocking=non_blocking, copy=True)
        attributes, context = t.__tensor_flatten__()
        tensors = {name: getattr(t, name) for name in attributes}
        moved = {  # a DTensor also has its mesh among them
            name: inner.to(device, non_blocking=non_blocking) if isinstance(inner, torch.Tensor) else inner
            for name, inner in tensors.items()
        }
        return type(t).__tensor_unflatten__(moved, context, t.shape, t.stride())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradient.to(ctx.device), None, None


def move_wrapper(
    t: torch.Tensor, device: torch.device, dtype: torch.dtype | None = None, non_blocking: bool = False
) -> torch.Tensor:
    """Return a wrapper of copies on ``device``; for a pending result, which is waited for, a copy without wrapper."""
    if dtype is not None:
        return t.to(dtype).to(device, non_blocking=non_blocking)  # a pending result has no wrapper then
    if is_distributed(t) and device.type == "cuda":  # `from_local` moves it to the devices of the mesh
        return convert_local(t, lambda local: local.to(device, non_blocking=non_blocking))
    return _Moved.apply(t, device, non_blocking)


def _inner(self: Any) -> Any:
    return getattr(self, self.__tensor_flatten__()[0][0])


def _teach(patches: Patches, tensor_class: type) -> None:
    patches.set(tensor_class, "device", property(lambda self: _inner(self).device))
    patches.set(tensor_class, "is_cuda", property(lambda self: _inner(self).is_cuda))
    patches.set(tensor_class, "is_cpu", property(lambda self: _inner(self).is_cpu))
    patches.set(tensor_class, "get_device", lambda self: _inner(self).get_device())


def _make_wrapper(patches: Patches, original: Callable[..., torch.Tensor]) -> staticmethod[..., torch.Tensor]:
    taught: set[type] = set()

    @functools.wraps(original)
    def make(cls: type, *args: object, **kwargs: object) -> torch.Tensor:
        node = active_node()
        if node is None or not hasattr(cls, "__tensor_flatten__") or simulated_device(kwargs.get("device")) is None:
            return original(cls, *args, **kwargs)
        if cls not in taught:
            taught.add(cls)
            _teach(patches, cls)
        return original(cls, *args, **{**kwargs, "device": node.backing})

    return staticmethod(make)


def _fake(spec: Any) -> torch.Tensor:
    # torch makes it on `mesh.device_type`, which asks for a driver even among fake tensors (pytorch/pytorch#122109):
    # torch/distributed/tensor/_op_schema.py, _rebuild_tensor_from_dtensor_meta, torch 2.13.
    node, meta = active_node(), spec.tensor_meta
    device = spec.mesh.device_type if node is None or spec.mesh.device_type != "cuda" else node.backing
    return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=device)


def _mesh(patches: Patches, original: Callable[..., None]) -> Callable[..., None]:
    """Patch DTensor when the first mesh is made; its import is slow, so it does not happen earlier."""
    taught = False

    @functools.wraps(original)
    def init(self: object, *args: object, **kwargs: object) -> None:
        nonlocal taught
        if not taught:
            taught = True
            _teach(patches, importlib.import_module(DTENSOR).DTensor)
            schema = importlib.import_module(f"{DTENSOR}._op_schema")
            if hasattr(schema, _FAKE):
                patches.set(schema, _FAKE, _fake)
        original(self, *args, **kwargs)

    return init


def install_wrappers(patches: Patches) -> None:
    patches.set(torch.Tensor, "_make_wrapper_subclass", _make_wrapper(patches, torch.Tensor._make_wrapper_subclass))
    mesh = device_mesh.DeviceMesh
    patches.set(mesh, "__init__", _mesh(patches, mesh.__init__))


_base = torch._C.TensorBase
_dtype: type = torch.dtype
Method = Callable[..., object]


def _target(device: object) -> torch.device:
    target = simulated_device(device)
    if target is not None:
        return target
    resolved = untraced_device(device)
    if resolved is None:
        raise TypeError(f"to(): a device must be an int, a string or a torch.device, not {type(device).__name__}")
    return resolved


# Attribute of a parameter in DistributedDataParallel's mixed precision, which exchanges `param.data` for it in each
# forward pass: torch/nn/parallel/distributed.py, _root_copy_hook, torch 2.13.
_LOWER = "_mp_param"
_VIEW = "_mgpu_check_view"  # the plain gradient in C++, a view of a bucket: its data must follow those of the gradient


@around
def _to(original: Method, self: torch.Tensor, *args: object, **kwargs: object) -> object:
    if active_node() is None:
        return original(self, *args, **kwargs)
    device = kwargs.get("device")
    dtype = kwargs.get("dtype")
    rest = args
    like = kwargs.get("other", args[0] if args else None)
    if isinstance(like, torch.Tensor):
        device, dtype = like.device, like.dtype
        rest = args[1:] if "other" not in kwargs else args
    elif args:
        if type(args[0]) is _dtype:
            if isinstance(self, LAZY):
                return uninitialized_on(self, self.device, args[0])
            return original(self, *args, **kwargs)
        device, rest = args[0], args[1:]
        if rest and (rest[0] is None or type(rest[0]) is _dtype):
            dtype, rest = rest[0], rest[1:]
    target = None if device is None else _target(device)
    if isinstance(self, LAZY):
        return uninitialized_on(self, target or self.device, dtype)
    on_device = isinstance(self, SimulatedTensor) or (is_wrapper(self) and self.is_cuda)
    if target is None or (target.type != "cuda" and not on_device):
        if isinstance(like, SimulatedTensor):  # t.to(device_tensor) with t on that device: only the dtype
            return original(self, dtype, *rest, **{k: v for k, v in kwargs.items() if k != "other"})
        return original(self, *args, **kwargs)
    options = dict(zip(("non_blocking", "copy"), rest, strict=False))
    non_blocking = bool(options.get("non_blocking", kwargs.get("non_blocking", False)))
    copy = bool(options.get("copy", kwargs.get("copy", False)))
    memory_format = kwargs.get("memory_format") or torch.preserve_format
    if target == self.device:
        return original(self, dtype=dtype or self.dtype, copy=copy, memory_format=memory_format)
    if is_wrapper(self):
        return move_wrapper(self, target, dtype, non_blocking)  # type: ignore[arg-type]
    return move(self, target, dtype, non_blocking, memory_format)  # type: ignore[arg-type]


@around
def _cuda(
    original: Method,
    self: torch.Tensor,
    device: object = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format = torch.preserve_format,
) -> object:
    if active_node() is None:
        return original(self, device, non_blocking, memory_format=memory_format)
    named = _target("cuda" if device is None else device)
    if named.type != "cuda":
        raise RuntimeError("Invalid device, must be cuda device")
    return self.to(named, non_blocking=non_blocking, memory_format=memory_format)


@around
def _cpu(original: Method, self: torch.Tensor, memory_format: torch.memory_format = torch.preserve_format) -> object:
    if isinstance(self, SimulatedTensor):
        return move(self, torch.device("cpu"), memory_format=memory_format)
    if is_wrapper(self) and self.is_cuda:
        return move_wrapper(self, torch.device("cpu"))
    if isinstance(self, LAZY) and active_node() is not None:
        return uninitialized_on(self, torch.device("cpu"), None)
    return original(self, memory_format=memory_format)


@around
def _type(
    original: Method, self: torch.Tensor, dtype: object = None, non_blocking: bool = False, **kwargs: object
) -> object:
    if active_node() is None:
        return original(self, dtype, non_blocking, **kwargs)
    if dtype is None:
        return type_name(self) if isinstance(self, SimulatedTensor) else original(self)
    if isinstance(dtype, torch.dtype):
        return self.to(dtype, non_blocking=non_blocking)
    name = dtype if isinstance(dtype, str) else f"{dtype.__module__}.{dtype.__name__}"  # type: ignore[attr-defined]
    short_name = name.rpartition(".")[2]
    by_name = {type_name(torch.empty(0, dtype=d)).rpartition(".")[2]: d for d in _DTYPES}
    if short_name not in by_name:
        raise ValueError(f"invalid type: '{name}'")
    device = ("cuda" if self.device.type != "cuda" else self.device) if ".cuda." in name else "cpu"
    return self.to(device=device, dtype=by_name[short_name], non_blocking=non_blocking)


@around
def _type_as(original: Method, self: torch.Tensor, other: torch.Tensor) -> object:
    return original(self, other) if active_node() is None else self.to(other)  # it moves to the device of the other


@functools.cache
def _on_device(cls: Any) -> type:
    made = type(cls.__name__, (cls, SimulatedTensor), {"__module__": cls.__module__})
    SUBCLASSES.add(made)
    return made


@around
def _as_subclass(original: Callable[..., Any], self: torch.Tensor, cls: Any) -> object:
    """Return a device tensor of a class of the script, such as the slices of a table in torchrec."""
    if not isinstance(self, SimulatedTensor) or cls is torch.Tensor or issubclass(cls, SimulatedTensor):
        return original(self, cls)
    with torch._C._DisableTorchDispatch():  # the alias would be a device tensor already, which cannot change its class
        out = original(self, _on_device(cls))
    out._dev = self._dev
    return out


_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int16, torch.int32,
    torch.int64, torch.bool,
)  # fmt: skip


@around
def _copy_(original: Method, self: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> object:
    if type(self) is not type(src) or isinstance(self, SimulatedTensor):
        own_device, source_device = self.device, src.device
        if (
            own_device != source_device
            and "cuda" in (own_device.type, source_device.type)
            and active_node() is not None
        ):
            if is_wrapper(src):
                return original(self, move_wrapper(src, own_device), non_blocking)
            if non_blocking and own_device.type == "cpu" and self.is_pinned() and captured_to_host(self, src):
                return self
            into = None if hardware.present is None else self.detach()
            late = non_blocking and own_device.type == "cuda"
            copied = original(self, move(src, own_device, non_blocking=late, into=into), non_blocking)
            if non_blocking and own_device.type == "cpu" and self.is_pinned():
                late_host_copy(self, source_device, non_blocking=True)
            return copied
    return original(self, src, non_blocking)


@around
def _pin_memory(original: Method, self: torch.Tensor, device: object = None) -> object:
    if active_node() is None:
        return original(self) if device is None else original(self, device)
    if isinstance(self, SimulatedTensor):
        raise RuntimeError(f"cannot pin '{type_name(self)}' only dense CPU tensors can be pinned")
    if self.is_pinned():
        return self
    return pin(self.clone(memory_format=torch.preserve_format))


@around
def _is_pinned(original: Method, self: torch.Tensor, device: object = None) -> object:
    if active_node() is None:
        return original(self) if device is None else original(self, device)
    if isinstance(self, SimulatedTensor) or self.layout is not torch.strided:
        return False
    return is_pinned(self.untyped_storage())


def _data(original: object) -> property:
    """Return the property ``data``, whose setter ``t.data = u`` moves the object ``t`` to the device of ``u``."""

    def get(self: torch.Tensor) -> torch.Tensor:
        return original.__get__(self)  # type: ignore[attr-defined]  # an attribute in C has it

    def put(self: torch.Tensor, value: torch.Tensor) -> None:
        simulated = isinstance(self, SimulatedTensor)
        if not simulated and not isinstance(value, SimulatedTensor):
            original.__set__(self, value)  # type: ignore[attr-defined]
            if isinstance(self, LAZY) and isinstance(value, LAZY) and TARGET in value.__dict__:
                self.__dict__[TARGET] = value.__dict__[TARGET]
        elif simulated and isinstance(value, SimulatedTensor):
            with torch._C._DisableTorchDispatch():
                original.__set__(self, value)  # type: ignore[attr-defined]
                if (view := self.__dict__.get(_VIEW)) is not None:
                    original.__set__(view, raw(value))  # type: ignore[attr-defined]
            self._dev = value._dev  # type: ignore[attr-defined]
        elif not torch._has_compatible_shallow_copy_type(self, value):
            original.__set__(raw(self), raw(value))  # type: ignore[attr-defined]  # raises
        else:
            become(self, value)

    return property(get, put)


def _grad(original: object) -> property:
    """Return the property ``grad``, on the device of its tensor even if C++ set a plain tensor (DDP's bucket views)."""

    def get(self: torch.Tensor) -> torch.Tensor | None:
        grad: torch.Tensor | None = original.__get__(self)  # type: ignore[attr-defined]
        if grad is None or is_elsewhere(grad):
            return grad
        if (type(grad) is SimulatedTensor) is not (type(self) is SimulatedTensor):
            if isinstance(self, SimulatedTensor):
                if type(grad) is not torch.Tensor:
                    return grad
                view, grad = grad, tag(grad, self._dev)
                if _LOWER in self.__dict__:
                    grad.__dict__[_VIEW] = view
            elif type(self) is torch.Tensor or type(self) is torch.nn.Parameter:
                grad = raw(grad)
            put_grad(self, grad)  # DDP's mixed precision in C++ may set another dtype
        return grad

    def put(self: torch.Tensor, value: torch.Tensor | None) -> None:
        if isinstance(value, torch.Tensor) and (
            isinstance(value, SimulatedTensor) or isinstance(self, SimulatedTensor)
        ):
            _check_grad_device(self.device, value.device)
        original.__set__(self, value)  # type: ignore[attr-defined]

    def drop(self: torch.Tensor) -> None:
        original.__delete__(self)  # type: ignore[attr-defined]

    return property(get, put, drop)


@around
def _gradients(original: Method, outputs: object, inputs: object, *args: object, **kwargs: object) -> object:
    """Wrap ``torch.autograd.grad``: zeros that C++ returns for an unused input are on the device of the input."""
    gradients = original(outputs, inputs, *args, **kwargs)
    sources = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)  # type: ignore[arg-type]
    return tuple(
        tag(g, source._dev) if isinstance(source, SimulatedTensor) and type(g) is torch.Tensor else g
        for g, source in zip(gradients, sources, strict=True)  # type: ignore[call-overload]
    )


def _check_grad_device(mine: torch.device, gradient_device: torch.device) -> None:
    tail = "Please ensure that the gradient and the tensor are on the same device"
    if mine.type != gradient_device.type:
        raise RuntimeError(
            f"attempting to assign a gradient with device type '{gradient_device.type}' to a tensor with device type "
            f"'{mine.type}'. {tail}"
        )
    if mine != gradient_device:
        raise RuntimeError(
            f"attempting to assign a gradient located on device with index '{gradient_device.index}' to a tensor "
            f"located on device with index '{mine.index}'. {tail}"
        )


def install_methods(patches: Patches) -> None:
    for wrap in (_to, _cuda, _cpu, _type, _type_as, _as_subclass, _copy_, _pin_memory, _is_pinned):
        patches.wrap(torch.Tensor, wrap.__name__[1:], wrap)
    patches.replace(torch.autograd.grad, _gradients(torch.autograd.grad))
    patches.set(torch.Tensor, "data", _data(_base.data))
    patches.set(torch.Tensor, "grad", _grad(_base.grad))
    patches.replace(torch._has_compatible_shallow_copy_type, compatible(torch._has_compatible_shallow_copy_type))
    install_lazy(patches)


Groups = dict[tuple[torch.device, torch.dtype | None], tuple[list[list[torch.Tensor | None]], list[int]]]


@around
def _group(
    original: Callable[..., Groups], tensorlistlist: Sequence[Sequence[torch.Tensor | None]], with_indices: bool = False
) -> Groups:
    """Group lists of tensors, for multi-tensor functions, by simulated device; C++ would read the backing device."""
    if not any(isinstance(t, SimulatedTensor) or is_distributed(t) for row in tensorlistlist for t in row):
        return original(tensorlistlist, with_indices)
    groups: Groups = {}
    for i, leading in enumerate(tensorlistlist[0]):
        if leading is None:
            continue
        key = (leading.device, leading.dtype)
        lists, indices = groups.setdefault(key, ([[] for _ in tensorlistlist], []))
        for column, row in zip(lists, tensorlistlist, strict=True):
            if row:
                column.append(row[i])
        if with_indices:
            indices.append(i)
    return groups


@around
def _parse_to(original: Callable[..., object], *args: object, **kwargs: object) -> object:
    """Parse the arguments of ``Module.to``, where an int means a CUDA device on every build of torch."""
    if args and isinstance(args[0], int) and not isinstance(args[0], bool):
        args = (untraced_device(args[0]), *args[1:])
    elif isinstance(kwargs.get("device"), int):
        kwargs["device"] = untraced_device(kwargs["device"])
    return original(*args, **kwargs)


@around
def _apply(
    original: Callable[..., torch.nn.Module], self: torch.nn.Module, fn: object, recurse: bool = True
) -> torch.nn.Module:
    """Make ``Module._apply`` move gradients: put each back, because C++ still refers to the data that it had before."""
    gradients = [(p, grad) for p in self._parameters.values() if p is not None and (grad := p.grad) is not None]
    try:
        return original(self, fn, recurse)
    finally:
        for param, grad in gradients:
            if param.grad is not grad:
                put_grad(param, grad)


def install_modules(patches: Patches) -> None:
    patches.wrap(torch._C, "_group_tensors_by_device_and_dtype", _group)
    patches.wrap(torch.nn.Module, "_apply", _apply)
    patches.wrap(torch._C._nn, "_parse_to", _parse_to)
    for name in ("torch.utils._foreach_utils", "torch.optim.optimizer"):
        # `torch.optim` deletes the name of its submodule: torch/optim/__init__.py, torch 2.13. Both modules list the
        # classes of tensors for which optimizers may group their work: _default_to_fused_or_foreach.
        module = importlib.import_module(name)
        patches.set(module, "_foreach_supported_types", [*module._foreach_supported_types, SimulatedTensor])
