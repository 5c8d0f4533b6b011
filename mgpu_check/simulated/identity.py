"""Move the data of a tensor object between the host and a device: ``t.data = u``, and with it ``Module.to``.

On a real node the object and its autograd state stay. Here a device tensor has another class and another
implementation, so this module exchanges them beneath the object and transfers the autograd state.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from mgpu_check.simulated.lazy import TARGET
from mgpu_check.simulated.tensor import CLASS, SimulatedTensor, raw

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
    hooks = {name: found for name in _HOOKS if (found := getattr(t, name)) is not None}
    if t.requires_grad and t._use_count() > 1:  # type: ignore[attr-defined]  # a graph may hold it
        torch.autograd.graph.get_gradient_edge(t).node.register_prehook(_refusal(t.device, value.device))
    new = _twin(t, value)
    _exchange(t, new)
    for name, found in hooks.items():
        setattr(t, name, found)  # even if Python still has them: C++ holds its own, which were exchanged
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
        kept = _base.data.__get__(t)
        _base.data.__set__(t, _dense(grad))
        try:
            put(t, grad)
        finally:
            _base.data.__set__(t, kept)


def _dense(grad: torch.Tensor) -> torch.Tensor:
    bare = raw(grad)
    return bare if bare.layout is torch.strided else bare.new_empty(bare.shape, layout=torch.strided)


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
    kind = t.__dict__.get(CLASS, type(t))
    if isinstance(t, torch.nn.Parameter):
        if not isinstance(new, SimulatedTensor) and issubclass(kind, torch.nn.Parameter):
            new = torch.Tensor._make_subclass(kind, new, t.requires_grad)
        else:
            new = torch.nn.Parameter(new, requires_grad=t.requires_grad)
    else:
        new.requires_grad_(t.requires_grad)
    new.__dict__.update({key: kept for key, kept in t.__dict__.items() if key not in _OWN})
    if isinstance(new, SimulatedTensor) and kind not in (_plain, torch.nn.Parameter, SimulatedTensor):
        new.__dict__[CLASS] = kind
    return new


def _exchange(one: Any, other: Any) -> None:
    """Exchange the contents of two tensor objects, as ``torch.utils.swap_tensors`` does, even if a graph holds one."""
    attributes = ["__class__", "__dict__", *copyreg._slotnames(type(one))]  # type: ignore[attr-defined]
    for name in attributes:
        if hasattr(one, name) and hasattr(other, name):
            kept = getattr(one, name)
            setattr(one, name, getattr(other, name))
            setattr(other, name, kept)
    torch._C._swap_tensor_impl(one, other)
