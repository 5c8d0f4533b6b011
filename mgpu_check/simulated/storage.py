"""Make storages of simulated tensors report their device, and move, resize and serialize like those of a device."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from mgpu_check.simulated.memory import BLOCK, Block, block_of
from mgpu_check.simulated.state import active_node, simulated_device
from mgpu_check.simulated.unwritten import never_written_bytes
from mgpu_check.torch_hooks.patches import Patches

_storage = torch.UntypedStorage
_base = torch._C.StorageBase


def _device(self: torch.UntypedStorage) -> torch.device:
    block = self.__dict__.get(BLOCK)
    if block is not None:
        device: torch.device = block.device
        return device
    return _base.device.__get__(self)  # type: ignore[no-any-return, attr-defined]


def _copy_on(self: torch.UntypedStorage, device: torch.device) -> torch.UntypedStorage:
    """Return a copy of the bytes of ``self`` as a storage of ``device``, simulated or not."""
    node = active_node()
    home = device if node is None or device.type != "cuda" else node.backing
    with torch._C._DisableTorchDispatch():
        made = torch.empty(self.nbytes(), dtype=torch.uint8, device=home).untyped_storage()
        made.copy_(self, False)
    if node is not None and device.type == "cuda":
        made.__dict__[BLOCK] = Block(device, node.memory[device.index], made.nbytes())
    return made


def _cuda(self: torch.UntypedStorage, device: object = None, non_blocking: bool = False) -> torch.UntypedStorage:
    target = simulated_device("cuda" if device is None else device)
    assert target is not None
    return self if self.device == target else _copy_on(self, target)


def _cpu(self: torch.UntypedStorage) -> torch.UntypedStorage:
    return self if self.device.type == "cpu" else _copy_on(self, torch.device("cpu"))


def _to(self: torch.UntypedStorage, *, device: object, non_blocking: bool = False) -> torch.UntypedStorage:
    target = simulated_device(device)
    if target is None:
        target = torch.device(device)  # type: ignore[call-overload]
    return self if self.device == target else _copy_on(self, target)


def _clone(self: torch.UntypedStorage) -> torch.UntypedStorage:
    return _copy_on(self, self.device)


def _resize_(self: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
    block, before = block_of(self), self.nbytes()
    if block is not None and size > before:
        block.memory.require(size)
    _base.resize_(self, size)  # type: ignore[attr-defined]
    if block is not None:
        block.resize(size)
        if size > before:
            never_written_bytes(self, before)
    return self


def _new(original: Callable[..., torch.UntypedStorage]) -> staticmethod[..., torch.UntypedStorage]:
    @functools.wraps(original)
    def new(cls: type, *args: object, **kwargs: object) -> torch.UntypedStorage:
        device = simulated_device(kwargs.get("device"))
        node = active_node()
        if device is None or node is None:
            return original(cls, *args, **kwargs)
        memory = node.memory[device.index]
        if args and isinstance(args[0], int):
            memory.require(args[0])
        made = original(cls, *args, **{**kwargs, "device": node.backing})
        made.__dict__[BLOCK] = Block(device, memory, made.nbytes())
        if args and isinstance(args[0], int) and args[0]:
            never_written_bytes(made, 0)
        return made

    return staticmethod(new)


def install_storage(patches: Patches) -> None:
    patches.set(_storage, "device", property(_device))
    patches.set(_storage, "is_cuda", property(lambda self: _device(self).type == "cuda"))
    patches.set(_storage, "__new__", _new(_storage.__new__))
    for name, function in (("cuda", _cuda), ("cpu", _cpu), ("to", _to), ("clone", _clone), ("resize_", _resize_)):
        patches.set(_storage, name, function)
