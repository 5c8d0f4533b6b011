"""Pickle between processes: functions by value, device tensors as CPU tensors."""

from __future__ import annotations

import io
import pickle
import sys
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import cloudpickle
from cloudpickle import cloudpickle as _cloudpickle

from mgpu_check.processes.named import by_name

ORIGINAL = "_mgpu_check_original"
"""Attribute of a function that replaces a test's body in the pytest process: the body."""

_LARGE = 1 << 18
"""Minimum bytes of a buffer that is sent apart from its message. Smaller ones are cheaper to copy."""

_FIND = "_find_imported_submodules"
_SLOW = getattr(_cloudpickle, _FIND, None)


def _find_imported_submodules(code: types.CodeType, dependencies: Iterable[object]) -> list[types.ModuleType]:
    """Return the imported submodules of `dependencies` that `code` names.

    cloudpickle's own function of this name scans `sys.modules` for each package that a function uses. With torch
    imported, the scan takes a third of the pytest process's time for a small test.
    """
    found = []
    names = set(code.co_names)
    below = [
        module.__name__
        for module in dependencies
        if isinstance(module, types.ModuleType) and getattr(module, "__package__", None)
    ]
    while below:
        parent = below.pop()
        for name in names:
            if (module := sys.modules.get(f"{parent}.{name}")) is not None:
                found.append(module)
                below.append(f"{parent}.{name}")
    return found


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle ships no types
    """Keeps the file names of code objects, which cloudpickle 3.1.3 and newer replace by "<dynamic-code>".

    Tracebacks, stacks and the record of collectives need the names in the rank.
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
    """A pickled value and its large buffers, which are not copied.

    Attributes:
        data: the pickle without the buffers.
        buffers: in the sending process, the memory of the value itself; in the receiving one, the new value's memory.
    """

    data: bytes
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
    """Undo `dumps`."""
    return pickle.loads(data)


def loads_apart(pickled: Pickled) -> Any:
    """Undo `dumps_apart`."""
    return pickle.loads(pickled.data, buffers=pickled.buffers)
