"""Send functions and classes to processes that ranks spawn: `multiprocessing` names them by their module.

Those of tests came to the rank by value, so the module may be another one there, or none, and they go on by value.
"""

from __future__ import annotations

import io
import pickle
import sys
import types
from multiprocessing.reduction import ForkingPickler
from typing import Any

from mgpu_check.processes.pickling import Pickler

__all__ = ["give_by_value"]


def give_by_value() -> None:
    """Pickle test modules by value in this process, from now on."""
    ForkingPickler.reducer_override = _reduce  # type: ignore[method-assign,assignment]


def _reduce(pickler: ForkingPickler, value: object) -> Any:
    if isinstance(value, (types.FunctionType, type)) and _found(value) is not value:
        buffer = io.BytesIO()
        Pickler(buffer).dump(value)
        return pickle.loads, (buffer.getvalue(),)
    return NotImplemented


def _found(value: types.FunctionType | type) -> object:
    """Return what other processes find by the name of a function or class."""
    found: object = sys.modules.get(value.__module__)
    for name in value.__qualname__.split("."):
        found = getattr(found, name, None)
    return found
