"""Support tensors that wrap a device tensor: DTensor, and pending results of functional collectives.

C++ stores a device for a wrapper, and autograd asks the driver of this device for a stream. So wrappers are created on
the backing device, where the wrapped tensor is too. In Python they report the device of the wrapped tensor.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import device_mesh

from mgpu_check.simulated.state import active_node, simulated_device
from mgpu_check.torch_hooks.patches import Patches

_DTENSOR = "torch.distributed.tensor"
_FAKE = "_rebuild_tensor_from_dtensor_meta"


def is_distributed(t: object) -> bool:
    """Return whether ``t`` is a DTensor, without importing DTensor."""
    kind = getattr(sys.modules.get(_DTENSOR), "DTensor", None)
    return kind is not None and isinstance(t, kind)


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


class _ToHost(torch.autograd.Function):
    """Copy the local tensor of a DTensor to the host. `DTensor.from_local` would move it back to the mesh's devices."""

    @staticmethod
    def forward(ctx: Any, t: Any, non_blocking: bool) -> Any:
        ctx.device = t.device
        return type(t)(t._local_tensor.to("cpu", non_blocking=non_blocking), t._spec, requires_grad=False)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient.to(ctx.device), None


def distributed_to_host(t: torch.Tensor, dtype: torch.dtype | None = None, non_blocking: bool = False) -> torch.Tensor:
    """Return a DTensor with a copy of the local tensor of ``t`` on the host."""
    moved: torch.Tensor = _ToHost.apply(t if dtype is None else t.to(dtype), non_blocking)
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
            _teach(patches, importlib.import_module(_DTENSOR).DTensor)
            schema = importlib.import_module(f"{_DTENSOR}._op_schema")
            if hasattr(schema, _FAKE):
                patches.set(schema, _FAKE, _fake)
        original(self, *args, **kwargs)

    return init


def install_wrappers(patches: Patches) -> None:
    patches.set(torch.Tensor, "_make_wrapper_subclass", _make_wrapper(patches, torch.Tensor._make_wrapper_subclass))
    mesh = device_mesh.DeviceMesh
    patches.set(mesh, "__init__", _mesh(patches, mesh.__init__))
