"""Support tensors that wrap a device tensor: DTensor, and pending results of functional collectives.

C++ stores a device for a wrapper, and autograd asks the driver of this device for a stream. So wrappers are created on
the backing device, where the wrapped tensor is too. In Python they report the device of the wrapped tensor.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import device_mesh

from mgpu_check.simulated.state import active_node, simulated_device
from mgpu_check.torch_hooks.patches import Patches
from mgpu_check.torch_hooks.values import DTENSOR, is_distributed, is_pending

_FAKE = "_rebuild_tensor_from_dtensor_meta"


def convert_local(t: torch.Tensor, convert: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Apply ``convert`` to the local tensor of DTensor ``t``, and return the DTensor with the result.

    ``convert`` must keep shape and strides. The result is differentiable if ``convert`` is.
    """
    given: Any = t
    local = convert(given.to_local())
    made: torch.Tensor = type(given).from_local(
        local, given.device_mesh, given.placements, run_check=False, shape=given.shape, stride=given.stride()
    )
    return made


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
        names, context = t.__tensor_flatten__()
        parts = {name: getattr(t, name) for name in names}
        moved = {  # a DTensor also has its mesh among them
            name: part.to(device, non_blocking=non_blocking) if isinstance(part, torch.Tensor) else part
            for name, part in parts.items()
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
    moved: torch.Tensor = _Moved.apply(t, device, non_blocking)
    return moved


def _inner(self: torch.Tensor) -> torch.Tensor:
    """Return the first tensor that ``self`` wraps."""
    names, _ = self.__tensor_flatten__()  # type: ignore[attr-defined]
    inner: torch.Tensor = getattr(self, names[0])
    return inner


def _teach(patches: Patches, kind: type) -> None:
    """Make wrappers of this class report the device of their wrapped tensor."""
    patches.set(kind, "device", property(lambda self: _inner(self).device))
    patches.set(kind, "is_cuda", property(lambda self: _inner(self).is_cuda))
    patches.set(kind, "is_cpu", property(lambda self: _inner(self).is_cpu))
    patches.set(kind, "get_device", lambda self: _inner(self).get_device())


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
    """Make the tensor that DTensor uses to infer the shape of a result, on the backing device: no driver is needed."""
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
