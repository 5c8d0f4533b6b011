"""Provide ``torch.cuda.FloatTensor`` and similar classes, and ``Tensor.new``: constructors older than dtypes."""

from __future__ import annotations

from collections.abc import Callable

import torch

from mgpu_check.simulated.refusals import refused
from mgpu_check.simulated.state import active_node, simulated_device
from mgpu_check.simulated.tensor import TYPE_NAMES, SimulatedTensor
from mgpu_check.torch_hooks.patches import Patches, around


class _Typed(type):
    """Metaclass of ``torch.cuda.FloatTensor``: a call makes a tensor, and device tensors of its dtype are instances."""

    dtype: torch.dtype
    layout: torch.layout
    is_cuda = True

    def __call__(cls, *args: object, **kwargs: object) -> torch.Tensor:
        if cls.layout is not torch.strided:
            refused(f"{cls.__module__}.{cls.__name__}")()
        return _made(torch.empty(0, dtype=cls.dtype), simulated_device(_given(kwargs.pop("device", None))), args)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, SimulatedTensor) and (instance.dtype, instance.layout) == (cls.dtype, cls.layout)

    @property
    def is_sparse(cls) -> bool:
        return cls.layout is torch.sparse_coo


def _given(device: object) -> object:
    return "cuda" if device is None else device


def _made(like: torch.Tensor, device: torch.device | None, args: tuple[object, ...]) -> torch.Tensor:
    """Return ``like.new(*args)`` on ``device``, from sizes, from a sequence, or over a tensor's own memory."""
    assert device is not None
    if len(args) == 1:
        (given,) = args
        if isinstance(given, torch.Tensor):
            if given.device != device:
                raise RuntimeError(
                    f"legacy constructor expects device type: {device.type} but device type: {given.device.type} was "
                    "passed"
                )
            return given.detach()
        if isinstance(given, (list, tuple)) and not isinstance(given, torch.Size):
            return torch.tensor(given, dtype=like.dtype, device=device)
    if any(isinstance(a, (torch.TypedStorage, torch.UntypedStorage)) for a in args):
        made = like.new(*args)
        return made.to(device)
    sizes = args[0] if len(args) == 1 and isinstance(args[0], torch.Size) else args or (0,)
    return torch.empty(sizes, dtype=like.dtype, device=device)  # type: ignore[arg-type]


@around
def _new(original: Callable[..., torch.Tensor], self: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
    if active_node() is None or not isinstance(self, SimulatedTensor):
        return original(self, *args, **kwargs)
    device = simulated_device(kwargs.get("device", self.device))
    if device is None:
        raise RuntimeError(
            f"legacy constructor expects device type: cuda but device type: {kwargs.get('device')} was passed"
        )
    return _made(torch.empty(0, dtype=self.dtype), device, args)


@around
def _default_type(original: Callable[..., None], kind: object, /) -> None:
    name = kind if isinstance(kind, str) else ""
    chosen = getattr(torch.cuda, name.removeprefix("torch.cuda."), None) if name.startswith("torch.cuda.") else kind
    if type(chosen) is _Typed:
        torch.set_default_dtype(chosen.dtype)
        torch.set_default_device("cuda")
    else:
        torch.set_default_device(None)
        original(kind)


def install_typed(patches: Patches) -> None:
    for owner, layout in ((torch.cuda, torch.strided), (torch.cuda.sparse, torch.sparse_coo)):
        for dtype, name in TYPE_NAMES.items():
            if hasattr(owner, name):
                body = {"__module__": owner.__name__, "dtype": dtype, "layout": layout}
                patches.set(owner, name, _Typed(name, (), body))
    patches.wrap(torch.Tensor, "new", _new)
    patches.replace(torch.set_default_tensor_type, _default_type(torch.set_default_tensor_type))
    patches.at_exit(lambda: torch.set_default_device(None) if _on_a_device() else None)


def _on_a_device() -> bool:
    return torch.get_default_device().type == "cuda"
