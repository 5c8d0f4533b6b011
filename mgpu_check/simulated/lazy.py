"""Support lazy parameters: they have no values to move, so they store the device for their later values."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from mgpu_check.simulated.state import active_node, simulated_device
from mgpu_check.torch_hooks.patches import Patches

TARGET = "_mgpu_check_target"
LAZY: type = UninitializedParameter.__mro__[1]  # the mixin of both kinds, which torch does not export by type


def uninitialized_on(t: torch.Tensor, target: torch.device, dtype: object) -> torch.Tensor:
    """Return a lazy tensor like ``t`` whose values will be created on ``target``; ``dtype`` None keeps its dtype."""
    make: Callable[..., torch.Tensor] = type(t)
    made = make(requires_grad=t.requires_grad, dtype=dtype or t.dtype)
    made.__dict__[TARGET] = target
    return made


def _new(original: Callable[..., torch.Tensor]) -> staticmethod[..., torch.Tensor]:
    def new(cls: type, *args: object, **kwargs: object) -> torch.Tensor:
        target = simulated_device(kwargs.get("device"))
        if target is None:
            return original(cls, *args, **kwargs)
        made = original(cls, *args, **{**kwargs, "device": "cpu"})
        made.__dict__[TARGET] = target
        return made

    return staticmethod(new)


def _parameter(original: Callable[..., torch.Tensor]) -> staticmethod[..., torch.Tensor]:
    def new(cls: type, data: object = None, requires_grad: bool = True) -> torch.Tensor:
        if isinstance(data, UninitializedParameter):  # Module.to makes a Parameter of what it moved
            return data
        return original(cls, data, requires_grad)

    return staticmethod(new)


def _materialize(original: Callable[..., None], become: Callable[..., None]) -> Callable[..., None]:
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


def install_lazy(patches: Patches, become: Callable[..., None]) -> None:
    for kind in (UninitializedParameter, UninitializedBuffer):
        patches.set(kind, "__new__", _new(kind.__new__))
    patches.set(torch.nn.Parameter, "__new__", _parameter(torch.nn.Parameter.__new__))
    patches.set(LAZY, "device", property(_device))
    patches.set(LAZY, "is_cuda", property(lambda self: self.device.type == "cuda"))
    patches.set(LAZY, "is_cpu", property(lambda self: self.device.type == "cpu"))
    patches.set(LAZY, "get_device", lambda self: -1 if self.device.index is None else self.device.index)
    patches.set(LAZY, "materialize", _materialize(vars(LAZY)["materialize"], become))
