"""``autograd.Function``: gradients of zeros, for outputs that the loss does not use, are on the devices of the outputs.

C++ makes those zeros, by what it knows of each output, which is the backing device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch.autograd.function import BackwardCFunction, Function

from mgpu_check.node.simulated.patches import Patches
from mgpu_check.node.simulated.tensor import SimulatedTensor, tag

__all__ = ["install_functions"]

_DEVICES = "_mgpu_check_devices"
_plain: type = torch.Tensor


def _apply(original: classmethod[Function, ..., object]) -> classmethod[Function, ..., object]:
    def apply(cls: type, *args: object, **kwargs: object) -> object:
        out = original.__get__(None, cls)(*args, **kwargs)
        if type(out) is tuple:
            # The node: outputs that are not differentiable have none, and views may have another one.
            for value in out:
                node = getattr(value, "grad_fn", None)
                if isinstance(node, BackwardCFunction):
                    node.__dict__[_DEVICES] = [o._dev if isinstance(o, SimulatedTensor) else None for o in out]
                    break
        return out

    return classmethod(apply)


def _backward(original: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(original)
    def apply(self: object, *grads: object) -> object:
        devices = self.__dict__.get(_DEVICES)
        if devices is not None and len(devices) == len(grads):
            grads = tuple(
                tag(grad, device) if device is not None and type(grad) is _plain else grad  # type: ignore[arg-type]
                for grad, device in zip(grads, devices, strict=True)
            )
        return original(self, *grads)

    return apply


def install_functions(patches: Patches) -> None:
    """Replace what runs forward and backward of functions that are written in Python."""
    patches.set(Function, "apply", _apply(vars(Function)["apply"]))
    patches.set(BackwardCFunction, "apply", _backward(vars(BackwardCFunction)["apply"]))
