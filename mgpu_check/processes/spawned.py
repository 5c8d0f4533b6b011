"""Pickle functions and classes by value for processes that ranks spawn, if `multiprocessing` cannot name them.

`multiprocessing` pickles them by the name of their module. The functions of tests came to the rank by value, so their
module may be missing in the spawned process, or be another one.
"""

from __future__ import annotations

import io
import pickle
import sys
import types
from multiprocessing.reduction import ForkingPickler
from typing import Any

from mgpu_check.processes.pickling import Pickler


def give_by_value() -> None:
    """Make `multiprocessing` in this process pickle functions and classes of test modules by value."""
    ForkingPickler.reducer_override = _reduce  # type: ignore[method-assign,assignment]


def _reduce(pickler: ForkingPickler, value: object) -> Any:
    if isinstance(value, (types.FunctionType, type)) and _found(value) is not value:
        buffer = io.BytesIO()
        Pickler(buffer).dump(value)
        return pickle.loads, (buffer.getvalue(),)
    return NotImplemented


def _found(value: types.FunctionType | type) -> object:
    """Return the object that another process would import by the name of a function or class."""
    found: object = sys.modules.get(value.__module__)
    for name in value.__qualname__.split("."):
        found = getattr(found, name, None)
    return found
