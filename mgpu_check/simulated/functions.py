"""Give the backward of an ``autograd.Function`` the devices and streams that it has on real devices.

C++ creates gradients of zeros, for outputs that the loss does not use, on the backing device; here they get the devices
of the outputs. During backward the device of the output is current, and so are the streams of the forward, as the
engine of autograd ensures for real devices.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch.autograd.function import BackwardCFunction, Function

from mgpu_check.simulated.streams import as_on, chosen_streams
from mgpu_check.simulated.tensor import SimulatedTensor, tag
from mgpu_check.torch_hooks.patches import Patches, around

_DEVICES = "_mgpu_check_devices"
_STREAMS = "_mgpu_check_streams"
_plain: type = torch.Tensor


def _apply(original: classmethod[Function, ..., object]) -> classmethod[Function, ..., object]:
    def apply(cls: type, *args: object, **kwargs: object) -> object:
        out = original.__get__(None, cls)(*args, **kwargs)
        # An output that is not differentiable has no node, and a view may have another node.
        for value in out if type(out) is tuple else (out,):
            node = getattr(value, "grad_fn", None)
            if isinstance(node, BackwardCFunction):
                if type(out) is tuple:
                    node.__dict__[_DEVICES] = [o._dev if isinstance(o, SimulatedTensor) else None for o in out]
                if isinstance(value, SimulatedTensor):
                    node.__dict__[_STREAMS] = value._dev.index, chosen_streams()
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
        forward = self.__dict__.get(_STREAMS)
        if forward is None:
            return original(self, *grads)
        with as_on(*forward):
            return original(self, *grads)

    return apply


@around
def _hook(original: Callable[..., object], self: torch.Tensor, hook: Callable[..., object]) -> object:
    """Run hooks on the streams that are current at registration: mostly those that computed the tensor."""
    streams = chosen_streams()
    if not streams or not isinstance(self, SimulatedTensor):
        return original(self, hook)
    index = self._dev.index

    @functools.wraps(hook)
    def on_streams(*args: object) -> object:
        with as_on(index, streams):
            return hook(*args)

    return original(self, on_streams)


def install_functions(patches: Patches) -> None:
    patches.set(Function, "apply", _apply(vars(Function)["apply"]))
    patches.set(BackwardCFunction, "apply", _backward(vars(BackwardCFunction)["apply"]))
    patches.wrap(torch.Tensor, "register_hook", _hook)
