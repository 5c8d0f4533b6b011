"""Tensors of all classes: copies on the CPU, bits, checksums, and values without the methods that users override;
when hooks must not read values (captures of CUDA graphs, transformations of torch.func), which arguments operators
write, and which operators draw random numbers.

Nothing here uses NumPy, which torch does not need.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch.nn.parameter import is_lazy

FLOAT8 = frozenset({torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz})
"""The dtypes of values in 8 bits; `float8_e8m0fnu` holds scales."""
INTEGER_OF_SIZE: Mapping[int, torch.dtype] = MappingProxyType(
    {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
)
"""Bytes of an element -> the signed integer dtype of that size, to compare the bits of other dtypes."""

_NOTHING = ctypes.c_char()


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype without its module: "float16"."""
    return str(dtype).removeprefix("torch.")


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values as a contiguous tensor on the CPU, without autograd history, which may share the memory."""
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of `tensor`, which may be sparse, as a dense tensor in the form of `plain`."""
    value = tensor.detach()
    return plain((value if value.layout == torch.strided else value.to_dense()).to("cpu", copy=True))


def plain_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy on the CPU, with complex numbers as real pairs. A DTensor is gathered first: a collective."""
    value = tensor.detach()
    return as_real(copied(value.full_tensor() if hasattr(value, "full_tensor") else value))


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a DTensor that this rank has, or another tensor itself, without autograd history."""
    # Not `to_local`, which makes a view under autograd (torch/distributed/tensor/_api.py, _ToTorchTensor, torch 2.13).
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local.detach()


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Return a complex tensor as real pairs in a new last dimension of 2, and any other tensor unchanged."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor as integers of the size of its elements; a complex one by its real pairs."""
    if tensor.dtype is torch.bool:
        return tensor.view(torch.uint8)
    real = as_real(tensor)
    return real.view(INTEGER_OF_SIZE[real.element_size()])


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a dense tensor's elements in order."""
    plain_tensor = plain(tensor)
    return bytes(memory_of(plain_tensor))


def digest_of(tensor: torch.Tensor) -> str:
    """Return a checksum of a dense tensor's dtype, shape and bits."""
    plain_tensor = plain(tensor)
    checksum = hashlib.sha1(memory_of(plain_tensor), usedforsecurity=False)  # processors have instructions for it
    checksum.update(f"{plain_tensor.dtype}{tuple(plain_tensor.shape)}".encode())
    return checksum.hexdigest()[:24]


def all_finite(tensor: torch.Tensor) -> bool:
    """Return whether no element is infinite or NaN, which holds for every integer tensor."""
    if not tensor.is_floating_point() and not tensor.is_complex():
        return True
    # The sum takes one pass, and `isfinite` four. A finite sum proves finite elements; an infinite one may be an
    # overflow.
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())


def memory_of(tensor: torch.Tensor) -> ctypes.Array[ctypes.c_char]:
    """Return the memory of a contiguous CPU tensor, as an array that keeps the tensor alive."""
    size = tensor.numel() * tensor.element_size()
    memory = (ctypes.c_char * size).from_address(tensor.data_ptr() or ctypes.addressof(_NOTHING))
    memory.of = tensor  # type: ignore[attr-defined]  # a new attribute, which keeps the tensor alive
    return memory


def indices_of(*devices: torch.device) -> list[int]:
    """Return the distinct indices of the devices that have one, in order: the ranks of an error about all of them."""
    return sorted({device.index for device in devices if device.index is not None})


DTENSOR = "torch.distributed.tensor"
_FUNCTIONAL = "torch.distributed._functional_collectives"
PACKAGES = ("torch", "mgpu_check")  # packages whose classes keep the values of a tensor in its memory
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_base: Any = torch._C.TensorBase


def is_distributed(value: object) -> bool:
    """Return whether a value is a DTensor, without importing DTensor."""
    return _is(value, DTENSOR, "DTensor")


def is_pending(value: object) -> bool:
    """Return whether a value is the result of a functional collective, which waits for it when it is used."""
    return _is(value, _FUNCTIONAL, "AsyncCollectiveTensor")


def _is(value: object, module: str, name: str) -> bool:
    cls = getattr(sys.modules.get(module), name, None)
    return cls is not None and isinstance(value, cls)


def readable(tensor: Any) -> torch.Tensor | None:
    """Return a dense tensor with the same values, without autograd history; None if the values cannot be read.

    A pending result is waited for, and a sparse or quantized tensor converted. A DTensor stays one. Tensors without
    values of their own are None: of `torch.func`, fake, on "meta", lazy, nested, freed, or in an unknown wrapper.
    """
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    if type(tensor) in _PLAIN and not wrapped and tensor.layout is torch.strided:
        plain: torch.Tensor = tensor.detach()
        if plain.data_ptr() and not (plain.is_quantized or plain.is_nested):
            return plain  # first, because each tensor of each step is read
    if is_pending(tensor):
        return readable(tensor.trigger_wait())
    with torch._C.DisableTorchFunctionSubclass():
        if wrapped or is_lazy(tensor) or _base.is_meta.__get__(tensor) or _base.is_nested.__get__(tensor):
            return None
        if is_distributed(tensor):
            return _base.detach(tensor)
        if type(tensor).__module__.partition(".")[0] not in PACKAGES:
            with torch._C._DisableTorchDispatch():
                tensor = torch.Tensor._make_subclass(torch.Tensor, tensor)
        value: torch.Tensor = _base.detach(tensor)
        if value.layout is not torch.strided:
            value = value.to_dense()
        elif value.is_quantized:
            value = value.dequantize()
        return value if _base.data_ptr(value) or not value.numel() else None


def is_capturing() -> bool:
    """Return whether operators only make a graph: the current stream captures, or `torch.jit` traces.
    No device is initialized to find out."""
    return is_tracing() or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())


def is_tracing() -> bool:
    """Return whether `torch.jit` traces: sizes are tensors then, and each operator changes the graph."""
    return torch._C._get_tracing_state() is not None


def is_transforming() -> bool:
    """Return whether `torch.func` transforms a function, whose tensors are wrapped."""
    return torch._C._functorch.peek_interpreter_stack() is not None


Argument = tuple[int, str]  # of an operator, by position and name


@functools.cache
def written_by(func: Any) -> tuple[Argument, ...]:
    """Return the arguments that an operator writes, by its schema."""
    arguments = enumerate(func._schema.arguments)
    return tuple((i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write)


def argument_values(arguments: Iterable[Argument], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the values of these arguments in a call; None for one that is left out."""
    return [args[i] if i < len(args) else kwargs.get(name) for i, name in arguments]


_SWITCHES = ("p", "dropout", "dropout_p", "train", "training")
"""Arguments of operators that turn off the draw when they are 0 or False."""


def draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether this call of an operator uses random numbers; dropout with probability 0 does not."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    for position, argument in enumerate(func._schema.arguments):
        if argument.name in _SWITCHES:
            value = args[position] if position < len(args) else kwargs.get(argument.name, argument.default_value)
            if isinstance(value, (bool, int, float)) and not value:
                return False
    return True
