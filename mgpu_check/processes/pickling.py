"""Pickling between processes: functions by value, device tensors as CPU tensors."""

from __future__ import annotations

import io
import pickle
import sys
import types
from typing import Any

import cloudpickle

from mgpu_check.processes.named import by_name

__all__ = ["ORIGINAL", "dumps", "loads"]

ORIGINAL = "_mgpu_check_original"
"""Attribute by which a function that stands in for a test's body, in the pytest process, names that body."""


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it ships no types
    """Sends tensors of any device as CPU tensors: the pytest process has no devices, real or simulated."""

    def reducer_override(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(obj, torch.Tensor) and obj.device.type != "cpu":
            return _to_cpu(obj).__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        if isinstance(obj, types.FunctionType) and getattr(obj, "is_hypothesis_test", False):
            # A test class travels with all its methods, but what draws examples is for the pytest process only.
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


def dumps(value: object) -> bytes:
    """Pickle `value`; functions and classes that cannot be imported elsewhere go by value."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def loads(data: bytes) -> Any:
    """Undo `dumps`."""
    return pickle.loads(data)
