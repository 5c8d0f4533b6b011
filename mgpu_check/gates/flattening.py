"""Flatten a state or an answer to tensors, numbers and texts by dotted name. Imports torch.

Two different values must not flatten to the same result, so a value that cannot be taken apart is refused. Unlike
`torch_hooks.nested`, this module also takes apart objects, generators and arrays, by their state.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import gc
import io
import os
import random
import re
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch

from mgpu_check.torch_hooks.tensors import copied

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_WITHOUT_STATE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType)


class Opaque(ValueError):
    """A value holds an object that cannot be compared."""


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor on the CPU; for a DTensor, a copy of this rank's part."""
    local = tensor.detach()
    return copied(local.to_local() if hasattr(local, "to_local") else local)


def flattened(
    value: Any, name: str = "", *, take: Callable[[torch.Tensor], torch.Tensor] = own_part, strict: bool = True
) -> dict[str, Any]:
    """Return `value` as tensors on the CPU (floats as float64), numbers and texts, by dotted name.

    Args:
        value: tensors, arrays, numbers, texts; mappings, sequences and sets of these; objects with ``state_dict()``,
            dataclasses, and other objects by their attributes.
        take: makes a copy of a tensor on the CPU.
        strict: refuse values that cannot be taken apart. If False, such a value is replaced by the name of its type.

    Raises:
        Opaque: `strict`, and a value cannot be taken apart or two entries have the same name.
    """
    return _flattened(value, name, take, strict, ())


def _flattened(
    value: Any, name: str, take: Callable[[torch.Tensor], torch.Tensor], strict: bool, outside: tuple[int, ...]
) -> dict[str, Any]:
    if isinstance(value, torch.Tensor):
        return {name: take(value)}
    if isinstance(value, torch.Generator):
        return {name: value.get_state().clone()}
    if isinstance(value, float):
        return {name: torch.tensor(value, dtype=torch.float64)}
    if value is None or isinstance(value, bool | int | str | bytes | complex):
        return {name: value}
    if _is_numpys(value) and hasattr(value, "dtype") and value.dtype.kind in "biufc":
        try:
            return {name: torch.as_tensor(value).clone()}
        except TypeError:  # torch lacks the dtype, such as longdouble: repr has all digits
            return {name: repr(value.tolist())}
    if id(value) in outside:
        return _opaque(value, name, strict, "which holds itself")
    parts = _parts(value)
    if parts is None:
        text = _text(value)
        return {name: text} if text is not None else _opaque(value, name, strict, "which cannot be taken apart")
    found: dict[str, Any] = {}
    for key, part in parts:
        inner = f"{name}.{key}" if name and key else name or key
        entries = _flattened(part, inner, take, strict, (*outside, id(value)))
        if strict and (twice := found.keys() & entries.keys()):
            raise Opaque(f"there are two entries {min(twice)!r}; give them keys that differ, and have no dots in them")
        found.update(entries)
    return found


def _opaque(value: Any, name: str, strict: bool, why: str) -> dict[str, Any]:
    kind = type(value).__name__
    if not strict:
        return {name: kind}
    raise Opaque(
        f"{name or 'the whole'} is a {kind}, {why}; give it a state_dict(), or give in its place the tensors, numbers "
        "and texts that it holds"
    )


def _parts(value: Any) -> list[tuple[str, Any]] | None:
    """Return the parts of a value by key; None if it has no parts. An empty key adds nothing to the name."""
    pairs: Iterable[tuple[Any, Any]]
    if isinstance(value, (*_WITHOUT_STATE, enum.Enum, os.PathLike, range, bytearray, set, frozenset)):
        return None
    if isinstance(value, Mapping):
        pairs = value.items()
    elif callable(getattr(value, "state_dict", None)):
        pairs = [("", value.state_dict())]
    elif dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        pairs = {**{name: getattr(value, name) for name in names}, **getattr(value, "__dict__", {})}.items()
    elif isinstance(value, functools.partial):
        pairs = [("func", value.func), ("args", value.args), ("keywords", value.keywords)]
    elif isinstance(value, random.Random):
        pairs = enumerate(value.getstate())
    elif isinstance(value, io.BytesIO):
        pairs = [("", value.getvalue())]
    elif _is_numpys(value) and hasattr(value, "bit_generator"):
        pairs = value.bit_generator.state.items()
    elif _is_numpys(value) and hasattr(value, "get_state"):
        pairs = enumerate(value.get_state())
    elif _is_numpys(value) and hasattr(value, "dtype") and value.ndim:
        pairs = enumerate(value.tolist())
    elif isinstance(value, Sequence) or type(value).__name__ == "deque":
        pairs = enumerate(value)
    elif getattr(value, "__dict__", None):
        pairs = vars(value).items()
    else:
        return None
    return [(str(key), part) for key, part in pairs]


def _text(value: Any) -> str | None:
    """Return a text that differs between different values; None if no text can guarantee that."""
    if isinstance(value, _WITHOUT_STATE):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', value.__name__)}"
    if isinstance(value, set | frozenset):  # sorted, because a set has no order
        texts = [_text(part) for part in value]
        return None if None in texts else repr(sorted(text for text in texts if text is not None))
    text, kind = repr(value), cast(Any, type(value))
    if kind.__repr__ is object.__repr__ or _ADDRESS.search(text) or _holds_tensors(value):
        return None  # repr of a tensor has four digits, and leaves out elements
    return text


def _holds_tensors(value: Any) -> bool:
    seen: dict[int, Any] = {}
    left = [value]
    while left:
        one = left.pop()
        if id(one) in seen or isinstance(one, _WITHOUT_STATE):
            continue
        seen[id(one)] = one
        if isinstance(one, torch.Tensor) or type(one).__name__ == "ndarray":
            return True
        left += gc.get_referents(one)
    return False


def _is_numpys(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "numpy"
