"""The tensor of a simulated device: a real tensor on the backing device that names the simulated device.

Storage, views, in-place operations and autograd are the real ones. The tensor reports the simulated device, and every
operator passes :func:`dispatch.run`, which checks that operands are on one device.

Storages report their device, and move, resize and serialize like those of a device. New memory that has not been
written yet is poison, so that code that forgets to initialize it fails. On a real device such memory keeps its earlier
contents, often zeros or the weights of the last model, so that the mistake shows only sometimes. Here floating and
complex numbers are NaN, signed integers their least value, unsigned ones their greatest, and booleans True. Host memory
stays as torch leaves it.
"""

from __future__ import annotations

import copy
import functools
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from mgpu_check.simulated.cuda.streams import poison
from mgpu_check.simulated.node import BLOCK, Block, active_node, block_of, simulated_device
from mgpu_check.torch_hooks.patches import Patches

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

CLASS = "_mgpu_check_class"  # the user's class of a tensor on the host
_no_dispatch = torch._C._DisableTorchDispatch
_strided = torch.strided
_plain: type = torch.Tensor
TYPE_NAMES = {
    torch.float32: "FloatTensor",
    torch.float64: "DoubleTensor",
    torch.float16: "HalfTensor",
    torch.bfloat16: "BFloat16Tensor",
    torch.uint8: "ByteTensor",
    torch.int8: "CharTensor",
    torch.int16: "ShortTensor",
    torch.int32: "IntTensor",
    torch.int64: "LongTensor",
    torch.bool: "BoolTensor",
    torch.complex64: "ComplexFloatTensor",
    torch.complex128: "ComplexDoubleTensor",
}

Runner = Callable[[object, tuple[object, ...], dict[str, object]], object]
_run: Runner


def set_runner(run: Runner) -> None:
    """Set the function that runs the operators of simulated tensors; ``dispatch`` imports this module."""
    global _run
    _run = run


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Yield the tensors among arguments, in lists and tuples too: functions written in C++ take no other containers."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return arguments with each tensor changed, in lists and tuples too; see `tensors_in`."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)(mapped(item, change) for item in value)
    return value


CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""Number of dimensions -> the memory format with the channels last."""


def is_channels_last(t: torch.Tensor) -> bool:
    last = CHANNELS_LAST.get(t.dim())
    return last is not None and not t.is_contiguous() and t.is_contiguous(memory_format=last)


class SimulatedTensor(torch.Tensor):
    """A tensor on a simulated ``cuda:i``.

    `tag` makes it around each result of the backing device. Torch passes every operator on it to `dispatch.run`. It may
    outlive its node: it keeps its values, and `to_real` still reads them.
    """

    _dev: torch.device
    is_cuda, is_cpu = True, False
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: object, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        return _run(func, args, kwargs or {})

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._dev

    def get_device(self) -> int:
        return int(self._dev.index)

    def numpy(self, *, force: bool = False) -> object:  # type: ignore[override]
        if force:
            return to_real(self).resolve_conj().resolve_neg().numpy()
        raise _no_numpy(self)

    def tolist(self) -> object:  # type: ignore[override]
        return self.cpu().tolist()

    def __array__(self, dtype: object = None) -> NoReturn:
        raise _no_numpy(self)

    def __dlpack_device__(self) -> tuple[int, int]:  # type: ignore[override]
        return 2, int(self._dev.index)  # kDLCUDA

    def __dlpack__(self, **_: object) -> NoReturn:
        raise BufferError("a simulated CUDA tensor has no device memory to export through DLPack")

    def record_stream(self, stream: object) -> None:
        return None

    def is_shared(self) -> bool:
        return True

    def share_memory_(self) -> SimulatedTensor:
        return self

    def __format__(self, spec: str) -> str:
        if self.dim() == 0:
            return format(self.item(), spec)
        return object.__format__(self, spec)

    def __repr__(self, *, tensor_contents: str | None = None) -> str:  # type: ignore[override]
        name = type(self).__name__
        text = torch._tensor_str._str(self, tensor_contents=tensor_contents)
        text = text.replace(f"{name}(", "tensor(", 1).replace("\n" + " " * (len(name) + 1), "\n" + " " * 7)
        return f"Parameter containing:\n{text}" if getattr(self, "_is_param", False) else text

    def __deepcopy__(self, memo: dict[int, object]) -> object:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol at the "
                "moment.  If you were attempting to deepcopy a module, this may be because of a torch.nn.Module "
                "attribute's value being a computed tensor"
            )
        if isinstance(self, torch.nn.Parameter):  # without gradient and attributes, like `Parameter.__deepcopy__`
            memo[id(self)] = twin = torch.nn.Parameter(self.detach().clone(), self.requires_grad)
            if CLASS in self.__dict__:
                twin.__dict__[CLASS] = self.__dict__[CLASS]
            return twin
        with torch.no_grad():
            if self.layout is _strided:
                storage = copy.deepcopy(self.untyped_storage(), memo)
                out = _on_storage(self, storage)
            else:
                out = self.clone()
            out.requires_grad_(self.requires_grad)
            memo[id(self)] = out
            if self.grad is not None:
                out.grad = copy.deepcopy(self.grad, memo)
        for key, value in self.__dict__.items():
            if key != "_dev":
                out.__dict__[key] = copy.deepcopy(value, memo)
        return out

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        hooks: OrderedDict[int, RemovableHandle] = OrderedDict()
        if self.layout is not _strided:
            return _of_sparse, (to_real(self.detach()), str(self._dev), self.requires_grad)
        storage = torch.storage.TypedStorage(wrap_storage=self.untyped_storage(), dtype=self.dtype, _internal=True)
        shape = (storage, self.storage_offset(), tuple(self.size()), self.stride())
        state = {k: v for k, v in self.__dict__.items() if k not in ("_dev", "_is_param", CLASS)}
        if getattr(self, "_is_param", False):
            arguments = (_on_storage(self, self.untyped_storage()), self.requires_grad, hooks)
            if state:
                return torch._utils._rebuild_parameter_with_state, (*arguments, state)
            return torch._utils._rebuild_parameter, arguments
        build = (torch._utils._rebuild_tensor_v2, (*shape, self.requires_grad, hooks))
        if state:
            return torch._tensor._rebuild_from_type_v2, (*build[:1], torch.Tensor, build[1], state)
        return build


def _no_numpy(t: SimulatedTensor) -> TypeError:
    return TypeError(
        f"can't convert {t._dev} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first."
    )


def _on_storage(like: SimulatedTensor, storage: torch.UntypedStorage) -> torch.Tensor:
    node = active_node()
    with _no_dispatch(), torch.no_grad():
        bare = torch.empty(0, dtype=like.dtype, device="cpu" if node is None else node.backing)
        bare.set_(storage, like.storage_offset(), like.size(), like.stride())
        if like.is_conj():
            bare = bare.conj()
        if like.is_neg():
            bare = torch._neg_view(bare)
    return tag(bare, like._dev)


def _of_sparse(real: torch.Tensor, device: str, requires_grad: bool) -> torch.Tensor:
    return real.to(device).requires_grad_(requires_grad)


SUBCLASSES: set[type] = set()
"""Classes that `Tensor.as_subclass` has made of SimulatedTensor and of a class of the script."""


def tag(bare: torch.Tensor, device: torch.device) -> SimulatedTensor:
    """Return a tensor on the simulated ``device`` that shares memory with ``bare``, a plain tensor."""
    if bare.layout is not _strided:
        out = torch.Tensor._make_subclass(SimulatedTensor, bare)  # a sparse tensor has no alias
        out._dev = device
        return out
    out = bare.as_subclass(SimulatedTensor)
    out._dev = device
    if not bare.is_mkldnn:
        storage = bare.untyped_storage()
        attributes = storage.__dict__
        if BLOCK not in attributes:
            node = active_node()
            if node is not None:
                attributes[BLOCK] = Block(device, node.memory[device.index], storage.nbytes())
    return out


def raw(t: torch.Tensor) -> torch.Tensor:
    """Return a plain tensor on the backing device over the memory of ``t``, outside autograd."""
    if not isinstance(t, SimulatedTensor):
        return t
    with _no_dispatch(), torch.no_grad():
        if t.layout is not _strided:
            return torch.Tensor._make_subclass(_plain, t)
        bare = t.as_subclass(_plain)  # type: ignore[var-annotated]
        return bare.detach() if bare.requires_grad else bare


def is_simulated(t: object) -> bool:
    return isinstance(t, SimulatedTensor)


def to_real(t: torch.Tensor) -> torch.Tensor:
    """Return a plain CPU tensor with the values of ``t``; it shares no memory with ``t`` and outlives the simulation.

    ``requires_grad`` is kept, the graph is not; an ``nn.Parameter`` stays one. Tensors of real devices are copied too.
    """
    # Methods of the C base class: they do the same inside a simulation, after it and in a process without one.
    with _no_dispatch(), torch.no_grad():
        bare = torch._C.TensorBase.detach(t)
        bare = torch._C.TensorBase.to(bare, "cpu", copy=True)
        if type(bare) is not _plain:
            bare = torch.Tensor._make_subclass(_plain, bare)
    if isinstance(t, torch.nn.Parameter):
        return torch.nn.Parameter(bare, requires_grad=t.requires_grad)
    return bare.requires_grad_(t.requires_grad)


def type_name(t: torch.Tensor) -> str:
    """Return ``t.type()`` as a machine with the device has it, e.g. "torch.cuda.FloatTensor"."""
    name = TYPE_NAMES.get(t.dtype, "Tensor")
    sparse = "sparse." if t.layout is torch.sparse_coo else ""
    return f"torch.{'cuda.' if isinstance(t, SimulatedTensor) else ''}{sparse}{name}"


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

    def bare(t: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")

    try:
        with _no_dispatch():
            named = {name: mapped(value, bare) for name, value in kwargs.items() if value is not None}
            output = make(*mapped(list(args), bare), **named)
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
        return block.device
    return _base.device.__get__(self)  # type: ignore[attr-defined]  # an attribute in C has it


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
