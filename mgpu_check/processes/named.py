"""Pickle by name the objects that exist once per process: modules of any kind, and torch's registries.

pickle and cloudpickle send only plain modules, functions and classes by name. ``torch.backends.cudnn`` is a module of
its own class. Operators, ``torch.default_generator`` and switches such as ``torch.backends.cuda.matmul`` are objects.
Copies of them would be refused, or have no effect.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable
from typing import Any

Reduced = tuple[Callable[..., Any], tuple[Any, ...]]
"""The result of a reducer for `pickle`: a function and its arguments."""

_places: dict[int, tuple[str, str]] = {}
_known_modules = 0


def by_name(value: Any) -> Reduced | None:
    """Return a reduction that finds `value` by name in another process; None if it must be pickled in the usual way."""
    kind = type(value)
    if issubclass(kind, types.ModuleType):
        return _module(value, kind)
    if issubclass(kind, type):
        return _class(value)
    if not _of_torch(kind):
        return None
    torch = sys.modules["torch"]
    if not _is_single(value):
        return None  # without a search of all modules
    if kind in (torch.finfo, torch.iinfo):
        return kind, (getattr(torch, value.dtype),)
    operators = sys.modules["torch._ops"]
    found: Any
    if kind is operators.OpOverloadPacket:
        return _operator, (value._qualified_op_name,)
    if kind is operators.OpOverload:
        return _operator, (value._schema.name, value._overloadname)
    if issubclass(kind, operators.HigherOrderOperator):
        found = getattr(operators.ops.higher_order, value._name, None)
        return (_operator, (f"higher_order::{value._name}",)) if found is value else None
    return _held(value)


def _module(value: types.ModuleType, kind: type) -> Reduced | None:
    name = value.__name__
    if sys.modules.get(name) is value:
        # cloudpickle handles plain modules, and sends test modules by value. Modules that are watched ask it to.
        reduces = kind is types.ModuleType or "__reduce__" in vars(kind)
        return None if reduces else (importlib.import_module, (name,))
    # ``torch.ops.aten`` and ``torch._C._functions`` are reachable only as attributes of their owners. torch writes the
    # name of ``torch.classes.prim`` without its last dot.
    for full in (name, f"torch.classes.{vars(value).get('name')}"):
        owner, _, attribute = full.rpartition(".")
        if owner in sys.modules and vars(sys.modules[owner]).get(attribute) is value:
            return _attribute, (owner, attribute)
    return None


def _class(value: type) -> Reduced | None:
    """Reduce a class of torch that is no attribute of its module, such as ``torch.nn.attention.SDPBackend``."""
    if not _of_torch(value):
        return None
    here: Any = sys.modules.get(value.__module__)
    for part in value.__qualname__.split("."):
        here = getattr(here, part, None)
    return None if here is value else _held(value)


def _held(value: Any) -> Reduced | None:
    global _known_modules
    if _known_modules != len(sys.modules):
        _known_modules = len(sys.modules)
        _places.clear()
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] == "torch":
                for attribute, one in list(vars(module).items()):
                    if not attribute.startswith("__") and _is_single(one):
                        _places.setdefault(id(one), (name, attribute))
    owner, attribute = _places.get(id(value), ("", ""))
    if not owner or getattr(sys.modules.get(owner), attribute, None) is not value:
        return None
    return _attribute, (owner, attribute)


def _is_single(value: Any) -> bool:
    """Return whether a value may be a per-process object of torch, which tensors, their parts and models are not."""
    kind = type(value)  # isinstance would read `__class__`, and deprecated objects warn about that
    if issubclass(kind, type):
        return _of_torch(value)
    torch = sys.modules["torch"]
    parts = (torch.UntypedStorage, torch.TypedStorage, torch.Size, torch.device, torch.dtype)  # pickle knows dtypes
    values = (types.ModuleType, types.FunctionType, torch.nn.Module, torch.Tensor, *parts)
    return _of_torch(kind) and not issubclass(kind, values)


def _of_torch(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "torch" and "torch" in sys.modules


def _attribute(owner: str, name: str) -> Any:
    return getattr(importlib.import_module(owner), name)


def _operator(name: str, overload: str | None = None) -> Any:
    """Return ``torch.ops.aten.add`` for "aten::add", or one of its overloads."""
    namespace, _, plain = name.partition("::")
    found = getattr(getattr(importlib.import_module("torch").ops, namespace), plain)
    return found if overload is None else getattr(found, overload or "default")
