"""Storages of simulated tensors: they report their device, and move, resize and serialize like those of a device. New
memory that has not been written yet is poison, so that code that forgets to initialize it fails.

On a real device such memory keeps its earlier contents, often zeros or the weights of the last model, so that the
mistake shows only sometimes. Here floating and complex numbers are NaN, signed integers their least value,
unsigned ones their greatest, and booleans True. Host memory stays as torch leaves it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping

import torch

from mgpu_check.simulated.cuda.streams import poison
from mgpu_check.simulated.node import BLOCK, Block, active_node, block_of, simulated_device
from mgpu_check.torch_hooks.patches import Patches

# Functions and methods of torch that return uninitialized memory.
EMPTY = frozenset(["empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"])
_HUGE = 1 << 28  # bytes; larger memory is filled at its ends only: the host may have less memory than the device
_END = 1 << 20  # elements to fill at each end
_LARGE = 1 << 24  # elements; smaller results are allocated on the host first, and then counted
_FILLABLE = frozenset(
    [
        torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
        torch.float8_e4m3fn, torch.float8_e5m2,
        torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64,
    ]
)  # fmt: skip
_no_dispatch = torch._C._DisableTorchDispatch


def never_written(t: torch.Tensor) -> None:
    """Fill a new tensor with poison. Sparse layouts and packed dtypes stay unchanged."""
    if t.layout is not torch.strided or not t.numel():
        return
    with _no_dispatch(), torch.no_grad():
        if t.numel() * t.itemsize > _HUGE and t.is_contiguous():
            ends = t.view(-1)
            never_written(ends[:_END])
            never_written(ends[-_END:])
            return
        if t.dtype in _FILLABLE:
            poison(t)
        elif t.dtype is torch.bool:
            t.fill_(True)


def never_written_bytes(storage: torch.UntypedStorage, start: int) -> None:
    """Set all bits of a storage from byte ``start``: this is NaN in every floating dtype."""
    with _no_dispatch(), torch.no_grad():
        bytes_of(storage, start).fill_(255)


def bytes_of(storage: torch.UntypedStorage, start: int = 0) -> torch.Tensor:
    """Return the bytes of a storage from byte ``start``, as a tensor on its real device that shares the memory."""
    with _no_dispatch(), torch.no_grad():
        home = torch._C.StorageBase.device.__get__(storage)  # type: ignore[attr-defined]  # not in the stubs
        count = storage.nbytes() - start
        return torch.empty(0, dtype=torch.uint8, device=home).set_(storage, start, (count,), (1,))


def _magnitude(values: Iterable[object]) -> float:
    """Return the product of all numbers in ``values``, an upper bound on the elements of a result with these sizes."""
    product = 1.0
    for value in values:
        if isinstance(value, (int, float)):
            product *= max(abs(value), 1)
        elif isinstance(value, (list, tuple)):
            product *= _magnitude(value)
    return product


def require(
    make: Callable[..., torch.Tensor], device: torch.device, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> None:
    """Raise ``torch.OutOfMemoryError`` if the result of ``make`` would not fit on ``device``, without allocating it."""
    tensors = [a.numel() for a in args if isinstance(a, torch.Tensor)]
    if _magnitude([*args, kwargs.get("size")]) * math.prod(tensors) < _LARGE:
        return
    refuse_oversized(make, device, args, {**kwargs, "device": "meta", "generator": None})


def _bytes_of(make: Callable[..., object], args: Iterable[object], kwargs: Mapping[str, object]) -> int | None:
    """Return the size in bytes of the results of ``make``, computed on 'meta'; None if 'meta' does not support it."""

    def bare(value: object) -> object:
        if isinstance(value, torch.Tensor):
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        if isinstance(value, (list, tuple)):
            return [bare(item) for item in value]
        return value

    try:
        with _no_dispatch():
            output = make(*map(bare, args), **{k: bare(v) for k, v in kwargs.items() if v is not None})
    except (RuntimeError, TypeError, NotImplementedError):
        return None
    results = output if isinstance(output, (list, tuple)) else [output]
    return sum(r.untyped_storage().nbytes() for r in results if isinstance(r, torch.Tensor))


def refuse_oversized(
    func: Callable[..., object], device: torch.device, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> None:
    """Raise ``torch.OutOfMemoryError`` after ``func`` has failed, if its result would not have fit on ``device``."""
    node = active_node()
    size = _bytes_of(func, args, kwargs)
    if node is not None and size is not None:
        node.memory[device.index].require(size)


def _emptying(func: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def call(*args: object, **kwargs: object) -> torch.Tensor:
        tensor = _sized(func)(*args, **kwargs)
        never_written(tensor)
        return tensor

    return call


def _sized(func: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def call(*args: object, **kwargs: object) -> torch.Tensor:
        require(func, args[0].device, args, kwargs)  # type: ignore[attr-defined]
        return func(*args, **kwargs)

    return call


def _resizing(func: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def call(*args: object, **kwargs: object) -> torch.Tensor:
        t = args[0]
        assert isinstance(t, torch.Tensor)
        storage = t.untyped_storage()
        block, before = block_of(storage), storage.nbytes()
        tensor = func(*args, **kwargs)
        grown = storage.nbytes() > before
        if grown and block is not None:
            block.resize(storage.nbytes())
        if grown:
            never_written_bytes(storage, before)
        return tensor

    return call


_OPERATORS: dict[str, Callable[[Callable[..., torch.Tensor]], Callable[..., torch.Tensor]]] = {
    "aten::empty_like": _emptying,
    "aten::new_empty": _emptying,
    "aten::new_empty_strided": _emptying,
    "aten::resize_": _resizing,
    "aten::resize_as_": _resizing,
    "aten::new_zeros": _sized,
    "aten::new_ones": _sized,
    "aten::new_full": _sized,
    "aten::repeat": _sized,
}


def operator(name: str, func: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return the kernel ``func`` of an operator, wrapped if its result is uninitialized or may not fit."""
    wrap = _OPERATORS.get(name)
    return func if wrap is None else wrap(func)


_storage = torch.UntypedStorage
_base = torch._C.StorageBase


def _device(self: torch.UntypedStorage) -> torch.device:
    block = self.__dict__.get(BLOCK)
    if block is not None:
        device: torch.device = block.device
        return device
    return _base.device.__get__(self)  # type: ignore[no-any-return, attr-defined]


def _copy_on(self: torch.UntypedStorage, device: torch.device) -> torch.UntypedStorage:
    node = active_node()
    home = device if node is None or device.type != "cuda" else node.backing
    with torch._C._DisableTorchDispatch():
        storage = torch.empty(self.nbytes(), dtype=torch.uint8, device=home).untyped_storage()
        storage.copy_(self, False)
    if node is not None and device.type == "cuda":
        storage.__dict__[BLOCK] = Block(device, node.memory[device.index], storage.nbytes())
    return storage


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
        storage = original(cls, *args, **{**kwargs, "device": node.backing})
        storage.__dict__[BLOCK] = Block(device, memory, storage.nbytes())
        if args and isinstance(args[0], int) and args[0]:
            never_written_bytes(storage, 0)
        return storage

    return staticmethod(new)


def install_storage(patches: Patches) -> None:
    patches.set(_storage, "device", property(_device))
    patches.set(_storage, "is_cuda", property(lambda self: _device(self).type == "cuda"))
    patches.set(_storage, "__new__", _new(_storage.__new__))
    patches.set(_storage, "clone", lambda self: _copy_on(self, self.device))
    for function in (_cuda, _cpu, _to, _resize_):
        patches.set(_storage, function.__name__[1:], function)
