"""Pickle between processes: functions by value, device tensors as CPU tensors, and objects that exist once per
process by name.

pickle and cloudpickle send only plain modules, functions and classes by name. ``torch.backends.cudnn`` is a module
of its own class. Operators, ``torch.default_generator`` and switches such as ``torch.backends.cuda.matmul`` are
objects. Copies of them would be refused, or have no effect.
"""

from __future__ import annotations

import importlib
import io
import pickle
import sys
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import cloudpickle
from cloudpickle import cloudpickle as _cloudpickle

Reduced = tuple[Callable[..., Any], tuple[Any, ...]]
"""The result of a reducer for `pickle`: a function and its arguments."""

_places: dict[int, tuple[str, str]] = {}
_known_modules = 0


def by_name(value: Any) -> Reduced | None:
    """Return a reduction that finds `value` by name in another process; None if it must be pickled in the usual way."""
    value_type = type(value)
    if issubclass(value_type, types.ModuleType):
        return _module(value, value_type)
    if issubclass(value_type, type):
        return _class(value)
    if not _of_torch(value_type):
        return None
    torch = sys.modules["torch"]
    if not _is_single(value):
        return None  # without a search of all modules
    if value_type in (torch.finfo, torch.iinfo):
        return value_type, (getattr(torch, value.dtype),)
    operators = sys.modules["torch._ops"]
    operator: Any
    if value_type is operators.OpOverloadPacket:
        return _operator, (value._qualified_op_name,)
    if value_type is operators.OpOverload:
        return _operator, (value._schema.name, value._overloadname)
    if issubclass(value_type, operators.HigherOrderOperator):
        operator = getattr(operators.ops.higher_order, value._name, None)
        return (_operator, (f"higher_order::{value._name}",)) if operator is value else None
    return _held(value)


def _module(value: types.ModuleType, module_type: type) -> Reduced | None:
    name = value.__name__
    if sys.modules.get(name) is value:
        # cloudpickle handles plain modules, and sends test modules by value. Modules that are watched ask it to.
        reduces = module_type is types.ModuleType or "__reduce__" in vars(module_type)
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
    return None if named_like(value) is value else _held(value)


def named_like(value: types.FunctionType | type) -> object:
    """Return the object that another process would import by the name of a function or class."""
    resolved: object = sys.modules.get(value.__module__)
    for attribute in value.__qualname__.split("."):
        resolved = getattr(resolved, attribute, None)
    return resolved


def _held(value: Any) -> Reduced | None:
    global _known_modules
    if _known_modules != len(sys.modules):
        _known_modules = len(sys.modules)
        _places.clear()
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] == "torch":
                for attribute, member in list(vars(module).items()):
                    if not attribute.startswith("__") and _is_single(member):
                        _places.setdefault(id(member), (name, attribute))
    owner, attribute = _places.get(id(value), ("", ""))
    if not owner or getattr(sys.modules.get(owner), attribute, None) is not value:
        return None
    return _attribute, (owner, attribute)


def _is_single(value: Any) -> bool:
    """Return whether a value may be a per-process object of torch, which tensors, their parts and models are not."""
    value_type = type(value)  # isinstance would read `__class__`, and deprecated objects warn about that
    if issubclass(value_type, type):
        return _of_torch(value)
    torch = sys.modules["torch"]
    pieces = (torch.UntypedStorage, torch.TypedStorage, torch.Size, torch.device, torch.dtype)  # pickle knows dtypes
    values = (types.ModuleType, types.FunctionType, torch.nn.Module, torch.Tensor, *pieces)
    return _of_torch(value_type) and not issubclass(value_type, values)


def _of_torch(value_type: type) -> bool:
    return value_type.__module__.partition(".")[0] == "torch" and "torch" in sys.modules


def _attribute(owner: str, name: str) -> Any:
    return getattr(importlib.import_module(owner), name)


def _operator(name: str, overload: str | None = None) -> Any:
    """Return ``torch.ops.aten.add`` for "aten::add", or one of its overloads."""
    namespace, _, plain = name.partition("::")
    packet = getattr(getattr(importlib.import_module("torch").ops, namespace), plain)
    return packet if overload is None else getattr(packet, overload or "default")


ORIGINAL = "_mgpu_check_original"  # attribute of a function that replaces a test's body in the pytest process: the body
_LARGE = 1 << 18  # minimum bytes of a buffer that is sent apart from its message. Smaller ones are cheaper to copy.

_FIND = "_find_imported_submodules"
_SLOW = getattr(_cloudpickle, _FIND, None)


def _find_imported_submodules(code: types.CodeType, dependencies: Iterable[object]) -> list[types.ModuleType]:
    """Return the imported submodules of `dependencies` that `code` names.

    cloudpickle's own function of this name (cloudpickle/cloudpickle.py, 3.1.3) scans `sys.modules` for each package
    that a function uses. With torch imported, the scan takes a third of the pytest process's time for a small test.
    """
    submodules = []
    code_names = set(code.co_names)
    below = [
        module.__name__
        for module in dependencies
        if isinstance(module, types.ModuleType) and getattr(module, "__package__", None)
    ]
    while below:
        parent = below.pop()
        for name in code_names:
            if (module := sys.modules.get(f"{parent}.{name}")) is not None:
                submodules.append(module)
                below.append(f"{parent}.{name}")
    return submodules


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle ships no types
    """Keeps the file names of code objects, which cloudpickle 3.1.3 and newer replace by "<dynamic-code>".

    It makes pickles of notebooks equal (cloudpipe/cloudpickle#538). Tracebacks, stacks and the record of collectives
    need the names in the rank.
    """

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.CodeType):
            make, arguments, *rest = self.dispatch_table[types.CodeType](obj)
            return _code, (obj.co_filename, make, arguments), *rest
        return super().reducer_override(obj)


def _code(filename: str, make: Callable[..., types.CodeType], arguments: tuple[Any, ...]) -> types.CodeType:
    return make(*arguments).replace(co_filename=filename)


class _CallPickler(Pickler):
    """Sends tensors of any device as CPU tensors: the pytest process has no devices, real or simulated."""

    def reducer_override(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(obj, torch.Tensor) and obj.device.type != "cpu":
            return _to_cpu(obj).__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        if isinstance(obj, types.FunctionType) and getattr(obj, "is_hypothesis_test", False):
            # A test class is sent with all its methods. Only the pytest process draws examples, so send the test's
            # body.
            inner = obj.hypothesis.inner_test  # type: ignore[attr-defined]
            obj = getattr(inner, ORIGINAL, inner)
        if (named := by_name(obj)) is not None:
            return named
        return super().reducer_override(obj)


def _to_cpu(tensor: Any) -> Any:
    simulated = sys.modules.get("mgpu_check.simulated")
    if simulated is not None and simulated.is_simulated(tensor):
        return simulated.to_real(tensor)
    return tensor.detach().cpu()


@dataclass(frozen=True)
class Pickled:
    """A pickled value and its large buffers, which are not copied."""

    data: bytes  # the pickle without the buffers
    # in the sending process, the memory of the value itself; in the receiving one, the new value's memory
    buffers: tuple[Any, ...]


def dumps(value: object) -> bytes:
    """Pickle `value`, with functions and classes by value if other processes cannot import them."""
    return _dumped(value, None)


def dumps_apart(value: object) -> Pickled:
    large: list[pickle.PickleBuffer] = []

    def stays(buffer: pickle.PickleBuffer) -> bool:
        with buffer.raw() as content:
            if content.readonly or content.nbytes < _LARGE:
                return True
        large.append(buffer)
        return False

    return Pickled(_dumped(value, stays), tuple(large))


def _dumped(value: object, stays: Callable[[pickle.PickleBuffer], bool] | None) -> bytes:
    buffer = io.BytesIO()
    if _SLOW is not None:
        setattr(_cloudpickle, _FIND, _find_imported_submodules)
    try:
        _CallPickler(buffer, protocol=pickle.HIGHEST_PROTOCOL, buffer_callback=stays).dump(value)
    finally:
        if _SLOW is not None:
            setattr(_cloudpickle, _FIND, _SLOW)
    return buffer.getvalue()


def loads(data: bytes) -> Any:
    return pickle.loads(data)


def loads_apart(pickled: Pickled) -> Any:
    return pickle.loads(pickled.data, buffers=pickled.buffers)
