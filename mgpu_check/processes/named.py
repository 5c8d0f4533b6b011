"""Send by name what each process has one of: modules of any kind, torch's registries.

Pickle and cloudpickle know plain modules, functions and classes by name. ``torch.backends.cudnn`` and its kin are modules
of a class of their own; operators, ``torch.default_generator`` and switches such as ``torch.backends.cuda.matmul`` are
objects. A copy of one would be refused, or change nothing.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable
from typing import Any

__all__ = ["by_name"]

Reduced = tuple[Callable[..., Any], tuple[Any, ...]]
"""What `pickle` wants of a reducer: a function, and what to call it with."""

_places: dict[int, tuple[str, str]] = {}
_known_modules = 0


def by_name(value: Any) -> Reduced | None:
    """Return how to find `value` in another process that has imported the same; None for what travels as any other
    object.
    """
    kind = type(value)
    if issubclass(kind, types.ModuleType):
        return _module(value, kind)
    if issubclass(kind, type):
        return _class(value)
    if not _of_torch(kind):
        return None
    torch = sys.modules["torch"]
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
        # Plain ones are cloudpickle's, which sends those of tests by value.
        return None if kind is types.ModuleType else (importlib.import_module, (name,))
    # ``torch.ops.aten`` and ``torch._C._functions`` can be reached only from what holds them; torch spells the name of
    # ``torch.classes.prim`` without its last dot.
    for full in (name, f"torch.classes.{vars(value).get('name')}"):
        owner, _, attribute = full.rpartition(".")
        if owner in sys.modules and vars(sys.modules[owner]).get(attribute) is value:
            return _attribute, (owner, attribute)
    return None


def _class(value: type) -> Reduced | None:
    """Find classes of torch that are not where they claim to be, as ``torch.nn.attention.SDPBackend``."""
    if not _of_torch(value):
        return None
    here: Any = sys.modules.get(value.__module__)
    for part in value.__qualname__.split("."):
        here = getattr(here, part, None)
    return None if here is value else _held(value)


def _held(value: Any) -> Reduced | None:
    """Find a value by the name under which a module of torch holds it."""
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
    """Return whether it may be something of torch of which a process has one: no tensors or models, which are values."""
    kind = type(value)  # asked of the object itself, deprecated ones warn
    if issubclass(kind, type):
        return _of_torch(value)
    torch = sys.modules["torch"]
    values = (types.ModuleType, types.FunctionType, torch.Tensor, torch.nn.Module)
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
