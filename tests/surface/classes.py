"""Sort the values of arguments into classes, such as "float16", "transposed", "above 2^20", "list of dict", "subgroup".

The functions are pure: they read properties of a tensor, never its elements, which are on a device.
"""

from __future__ import annotations

import enum
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from mgpu_check.torch_hooks.collective_table import ROOTS
from mgpu_check.torch_hooks.tensors import name_of
from tests.surface.names import SurfaceParameter

_BORDERS = (8, 10, 12, 16, 20)
SIZES = ("size 0", "size 1", "odd size", *(f"to 2^{power}" for power in _BORDERS), "above 2^20")
"""The classes of numbers of elements."""
LAYOUTS = ("contiguous", "transposed", "strided", "expanded", "channels_last", "offset")
"""The classes of layouts of dense tensors."""
OPERATIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
"""The operations of reductions."""

_GLOBAL_ROOTS = (*(name for name in ROOTS if not name.startswith("group_")), "peer")

_PARTS = 8
"""Parts of a container that are sorted: the first ones stand for the rest."""
_LONGEST = 24
_DEPTH = 4


def classes_of(parameter: SurfaceParameter, value: Any, rank: int | None = None, ranks: int = 0) -> set[str]:
    """Return the classes of an argument.

    Args:
        rank: the rank of this process, which may be the root or peer; None outside of a world.
        ranks: the world size.
    """
    found = set()
    if parameter.optional:
        found.add("default" if _same(value, parameter.default) else "not the default")
    if parameter.name in _GLOBAL_ROOTS and isinstance(value, int) and rank is not None:
        found |= {"itself" if value == rank else "another rank"}
        found |= {"rank 0" if value == 0 else "last rank" if value == ranks - 1 else "rank between"}
    else:
        found.update(_of(value, 0))
    return found


def size_of(numel: int) -> str:
    """Return the class of a number of elements, by the powers of two where algorithms change."""
    if numel < 2:
        return f"size {numel}"
    return next((f"to 2^{power}" for power in _BORDERS if numel <= 1 << power), "above 2^20")


def layout_of(tensor: torch.Tensor) -> str:
    """Return the class of a tensor's layout, apart from its offset in memory."""
    if tensor.layout is not torch.strided:
        return "sparse"
    if tensor.is_contiguous():
        return "contiguous"
    strides = [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
    if 0 in strides:
        return "expanded"
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        return "channels_last"
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return "transposed" if extent == tensor.numel() else "strided"


def _same(value: Any, default: Any) -> bool:
    if value is default:
        return True
    plain = (bool, int, float, str, tuple, frozenset, type(None), torch.dtype, enum.Enum)
    return type(value) is type(default) and isinstance(value, plain) and bool(value == default)


def _of(value: Any, depth: int) -> Iterator[str]:
    if value is None or isinstance(value, bool):
        yield str(value)
    elif isinstance(value, enum.Enum):
        yield value.name
    elif isinstance(value, int):
        yield "negative" if value < 0 else str(value) if value < 2 else size_of(value)
    elif isinstance(value, float):
        yield _of_float(value)
    elif isinstance(value, str):
        # The name of a temporary directory is another one in each run.
        yield "a path" if os.path.isabs(value) else repr(value) if len(value) <= _LONGEST else "long text"
    elif isinstance(value, torch.dtype):
        yield name_of(value)
    elif isinstance(value, torch.Tensor):
        yield from _of_tensor(value)
    elif isinstance(value, (Mapping, list, tuple)):
        yield from _of_container(value, depth)
    else:
        yield _of_object(value)


def _of_float(value: float) -> str:
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "infinite"
    return "negative" if value < 0 else str(value) if value in (0.0, 1.0) else "fraction" if value < 1 else "above 1"


def _of_tensor(tensor: torch.Tensor) -> Iterator[str]:
    if type(tensor).__name__ == "DTensor":
        yield "DTensor"
    yield name_of(tensor.dtype)
    yield f"{tensor.dim()}-d" if tensor.dim() < 5 else "5-d or more"
    if tensor.dim() == 2 and tensor.shape[0] == tensor.shape[1] > 1:
        yield "square"
    if tensor.dim() > 1 and tensor.shape[-1] > 256:
        yield "rows above 2^8"
    size = tensor.numel()
    yield size_of(size)
    if size > 1 and size % 2:
        yield "odd size"
    layout = layout_of(tensor)
    yield layout
    if layout != "sparse" and tensor.storage_offset():
        yield "offset"
    yield f"on {tensor.device.type}"
    if tensor.requires_grad:
        yield "requires grad"


def _of_container(value: Any, depth: int) -> Iterator[str]:
    mapping = isinstance(value, Mapping)
    kind = "dict" if mapping else "named tuple" if hasattr(value, "_fields") else type(value).__name__
    parts = list(value.values() if mapping else value)[:_PARTS] if depth < _DEPTH else []
    yield kind if len(value) > 1 else f"{kind} of {len(value)}"
    inner = set()
    for part in parts:
        if isinstance(part, (Mapping, list, tuple)):
            name = "dict" if isinstance(part, Mapping) else type(part).__name__
            inner.add(f"{kind} with a {name}")
        yield from _of(part, depth + 1)
    yield from inner
    yield from _of_sequence(parts)


def _of_sequence(parts: Sequence[Any]) -> Iterator[str]:
    """Yield the order of numbers or devices, and whether tensors have unequal sizes."""
    if len(parts) < 2:
        return
    if all(isinstance(part, torch.Tensor) for part in parts):
        yield "sizes differ" if len({part.numel() for part in parts}) > 1 else "sizes equal"
        return
    numbers = [part.index if isinstance(part, torch.device) else part for part in parts]
    if all(type(number) is int for number in numbers):
        if len(set(numbers)) < len(numbers):
            yield "equal" if len(set(numbers)) == 1 else "some equal"
        else:
            yield "in order" if numbers == sorted(numbers) else "out of order"


def _of_object(value: Any) -> str:
    if isinstance(value, dist.ProcessGroup):
        if value is dist.group.WORLD:
            return "world"
        return "subgroup" if value.size() < dist.get_world_size() else "all ranks"
    if isinstance(value, torch.device):
        return f"on {value.type}"
    if isinstance(value, type):
        return "class"
    name = type(value).__name__
    if name in ("RedOpType", "ReduceOp"):
        return next((one for one in OPERATIONS if value == getattr(dist.ReduceOp, one, None)), name)
    if name == "DeviceMesh":
        return f"mesh of {value.ndim}"
    if isinstance(value, torch.nn.Module):
        return "module"
    return "function" if (callable(value) and not hasattr(value, "__dict__")) or name == "function" else name
